"""The gemma2 architecture: soft-caps on scores and logits, norms after each sublayer, every other layer slides."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("gemma2",))
