"""The bitnet architecture."""

from selfspec.adapter import Adapter

ADAPTER = Adapter(model_types=("bitnet",))
