"""UMT5: every layer has a bias of relative positions of its own."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("umt5",),
    layers="decoder.block",
    attention=("layer.0.SelfAttention", "layer.1.EncDecAttention"),
    mlp="layer.2.DenseReluDense",
    ragged="padding",
)
