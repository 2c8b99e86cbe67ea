"""The qwen3 architecture."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("qwen3",))
