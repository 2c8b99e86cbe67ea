"""The qwen2 architecture."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("qwen2",))
