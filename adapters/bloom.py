"""The bloom architecture: ALiBi made of the padding mask, sublayers that add the residual stream themselves."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("bloom",),
    layers="transformer.h",
    attention="self_attention",
    layer_returns=2,
    without_attention="residual",
    without_mlp="residual",
    ragged="padding",
)
