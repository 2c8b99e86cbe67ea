"""Encoder-decoders like bart, and their decoders alone, whose layers return tuples."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("mvp", "trocr"),
    layers="model.decoder.layers",
    attention=("self_attn", "encoder_attn"),
    mlp=("fc1", "fc2"),
    layer_returns=2,
    positions="embed_positions",
)
