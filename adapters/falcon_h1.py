"""Falcon-H1, with attention and Mamba side by side in every layer, and Bamba, with one of them."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("bamba", "falcon_h1"),
    attention=("self_attn", "mamba"),
    recurrent=("mamba",),
    mlp="feed_forward",
    layer_returns=2,
)
