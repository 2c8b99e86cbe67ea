"""The mpt architecture: ALiBi made of the length of the keys, an MLP that adds the residual stream itself."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("mpt",),
    layers="transformer.blocks",
    attention="attn",
    mlp="ffn",
    layer_returns=2,
    without_mlp="residual",
    ragged="padding",
)
