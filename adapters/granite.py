"""The granite architecture: multipliers on embeddings, residuals, scores and logits."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("granite",))
