"""The mistral architecture."""

from selfspec.adapter import Adapter

ADAPTER = Adapter(model_types=("mistral",))
