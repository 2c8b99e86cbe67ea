"""The llama4 architecture, text alone: experts that hand their router logits out, chunked attention."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(model_types=("llama4_text",), mlp="feed_forward", mlp_returns=2)
