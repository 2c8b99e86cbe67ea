"""Falcon-H1: attention and Mamba side by side in every layer."""

from selfspec.adapter import Adapter

ADAPTER = Adapter(
    model_types=("falcon_h1",),
    attention=("self_attn", "mamba"),
    recurrent=("mamba",),
    mlp="feed_forward",
    layer_returns=2,
)
