"""Layers with states, alone or between layers of attention."""

from functools import partial

from selfspec.model.adapter import Adapter

_with_mamba = partial(Adapter, attention=("self_attn", "mamba"), recurrent=("mamba",))

ADAPTERS = (
    # One mixer in each layer, and no MLP.
    Adapter(
        ("falcon_mamba", "mamba", "mamba2"), layers="backbone.layers", attention="mixer", recurrent=("mixer",), mlp=()
    ),
    _with_mamba(("jamba",), mlp="feed_forward"),
    # Falcon-H1 has attention and Mamba side by side in every layer, Bamba one of them.
    _with_mamba(("bamba", "falcon_h1"), mlp="feed_forward", layer_returns=2),
    # Granite 4: a mixture of experts and a shared MLP in each layer.
    _with_mamba(("granitemoehybrid",), mlp=("block_sparse_moe", "shared_mlp")),
    # Attention between short convolutions.
    Adapter(("lfm2", "lfm2_moe"), attention=("self_attn", "conv"), recurrent=("conv",), mlp="feed_forward"),
    # Attention and gated delta rule.
    Adapter(
        ("olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        attention=("self_attn", "linear_attn"),
        recurrent=("linear_attn",),
    ),
)
