"""The roformer architecture, like bert; it counts positions from the length of the cache."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("roformer",),
    layers="roformer.encoder.layer",
    attention="attention",
    mlp=("intermediate", "output"),
    layer_returns=2,
    without_attention="input",
    without_mlp="residual",
    requires=(("is_decoder", True),),
    ragged="none",
)
