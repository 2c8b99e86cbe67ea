"""The qwen2 architecture."""

from selfspec.adapter import Adapter

ADAPTER = Adapter(model_types=("qwen2",))
