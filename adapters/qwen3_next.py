"""Hybrids of attention and gated delta rule, each under a name of its own."""

from selfspec.adapter import Adapter

ADAPTER = Adapter(
    model_types=(
        "kimi_linear",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "qwen4_exp",
        "qwen4_exp_text",
    ),
    attention=("self_attn", "linear_attn"),
    recurrent=("linear_attn",),
)
