"""The qwen3_moe architecture: a mixture of experts stands where the MLP does."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("qwen3_moe",))
