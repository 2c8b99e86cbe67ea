"""Encoders used as decoders, like bert, whose layers return tuples."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("megatron-bert", "rembert"),
    layers="{base}.encoder.layer",
    attention="attention",
    mlp=("intermediate", "output"),
    layer_returns=2,
    without_attention="input",
    without_mlp="residual",
    requires=(("is_decoder", True),),
)
