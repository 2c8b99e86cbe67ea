"""Decoders of encoder-decoder architectures, used alone, whose layers return tuples."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("mvp", "trocr"),
    layers="model.decoder.layers",
    mlp=("fc1", "fc2"),
    layer_returns=2,
    ragged="none",
)
