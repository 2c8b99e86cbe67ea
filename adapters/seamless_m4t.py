"""Seamless: translation of text and speech, with positions counted from the length of the cache."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("seamless_m4t", "seamless_m4t_v2"),
    layers="model.decoder.layers",
    attention=("self_attn", "cross_attention"),
    mlp="ffn",
    positions="embed_positions",
)
