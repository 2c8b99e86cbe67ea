"""Hybrids of attention and gated delta rule, each under its own name."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=(
        "lara_mini",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
    ),
    attention=("self_attn", "linear_attn"),
    recurrent=("linear_attn",),
)
