"""The mistral architecture."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("mistral",))
