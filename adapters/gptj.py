"""The gptj architecture: attention and MLP in parallel."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("gptj", "codegen"), layers="transformer.h", attention="attn", layer_returns=2)
