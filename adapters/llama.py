"""The llama architecture."""

from selfspec.adapter import Adapter

ADAPTER = Adapter(model_types=("llama",))
