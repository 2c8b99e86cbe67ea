"""The bitnet architecture."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("bitnet",))
