"""The phi3 architecture; longrope changes all its frequencies beyond the original context."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("phi3",))
