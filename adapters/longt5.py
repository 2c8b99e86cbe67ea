"""LongT5, whose decoder is a T5's but for what its layers return."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("longt5",),
    layers="decoder.block",
    attention=("layer.0.SelfAttention", "layer.1.EncDecAttention"),
    mlp="layer.2.DenseReluDense",
    layer_returns=5,
    attention_returns=3,
    lends=("has_relative_attention_bias", "relative_attention_bias"),
    ragged="padding",
)
