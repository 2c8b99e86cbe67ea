"""The phi3 architecture; longrope changes all its frequencies beyond the original context."""

from selfspec.adapter import Adapter

ADAPTER = Adapter(model_types=("phi3",))
