"""The olmo2 architecture: norms after the sublayers and none before them."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("olmo2",))
