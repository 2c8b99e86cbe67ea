"""T5 and kin: relative positions, of which the first layer makes a bias for all."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("mt5", "t5"),
    layers="decoder.block",
    attention=("layer.0.SelfAttention", "layer.1.EncDecAttention"),
    mlp="layer.2.DenseReluDense",
    layer_returns=3,
    attention_returns=3,
    lends=("has_relative_attention_bias", "relative_attention_bias"),
    ragged="padding",
)
