"""Mixtures of experts whose MLPs or attentions go by other names, or hand out more than hidden states."""

from selfspec.model.adapter import Adapter

ADAPTERS = (
    # Attention sinks; experts hand out their router's scores.
    Adapter(("gpt_oss",), mlp_returns=2),
    # Text alone, with chunked attention.
    Adapter(("llama4", "llama4_text"), mlp="feed_forward", mlp_returns=2),
    # Experts in the attention too.
    Adapter(("jetmoe",), attention="self_attention", attention_returns=3),
    # With or without an MLP beside the experts.
    Adapter(("granitemoe", "granitemoe_swa", "granitemoeshared"), mlp=("block_sparse_moe", "shared_mlp")),
)
