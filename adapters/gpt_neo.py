"""The gpt_neo architecture: every other layer looks at a local window."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(model_types=("gpt_neo",), layers="transformer.h", attention="attn", layer_returns=2, ragged="padding")
