"""Which architectures have modules for multi-token prediction in their checkpoints, and how these are named."""

from dataclasses import replace

from selfspec.architecture import MtpLayout, OfModule

_BEHIND_THE_LAYERS = MtpLayout(config=(("first_k_dense_replace", 0), ("mlp_layer_types", ["sparse"])))

_BESIDE_THE_MODEL = MtpLayout(
    embedding="mtp.pre_fc_norm_embedding",
    hidden="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    norm="mtp.norm",
    block="mtp.layers.0.",
    counts=("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers"),
    config=(("layer_types", ["full_attention"]), ("mlp_only_layers", []), ("decoder_sparse_step", 1)),
)

LAYOUTS: dict[str, MtpLayout] = {
    # MiMo 7B: but for the module a Qwen2, and so it is loaded.
    "qwen2": MtpLayout(
        embedding="mtp_layers.0.token_layernorm",
        hidden="mtp_layers.0.hidden_layernorm",
        projection="mtp_layers.0.input_proj",
        norm="mtp_layers.0.final_layernorm",
        block="mtp_layers.0.",
        hidden_first=True,
        reads="last",
        config=(("layer_types", ["full_attention"]),),
    ),
    "deepseek_v3": _BEHIND_THE_LAYERS,
    "glm4_moe": _BEHIND_THE_LAYERS,
    "glm4_moe_lite": _BEHIND_THE_LAYERS,
    "glm4v_moe_text": _BEHIND_THE_LAYERS,
    "hy_v3": MtpLayout(norm="layers.{n}.final_layernorm", config=(("mlp_layer_types", ["sparse"]),)),
    "mimo_v2_flash": MtpLayout(
        embedding="mtp.layers.0.enorm",
        hidden="mtp.layers.0.hnorm",
        projection="mtp.layers.0.eh_proj",
        norm="mtp.layers.0.final_layernorm",
        block="mtp.layers.0.",
        renames=(("pre_mlp_layernorm", "post_attention_layernorm"),),
        config=(("layer_types", ["sliding_attention"]), ("mlp_layer_types", ["dense"])),
    ),
    # Step 3.5 and 3.7.
    "step3p5": MtpLayout(
        head="layers.{n}.shared_head.head",
        reads="last",
        recycles="last",
        renames=((".transformer.", "."), (".shared_head.output.", ".shared_head.head.")),
        config=(
            ("layer_types", OfModule("mtp_layer_types")),
            ("mlp_layer_types", OfModule("mtp_mlp_layer_types")),
            ("swiglu_limits", None),
            ("swiglu_limits_shared", None),
        ),
    ),
    "qwen3_next": _BESIDE_THE_MODEL,
    "qwen3_5_text": _BESIDE_THE_MODEL,
    "qwen3_5_moe_text": _BESIDE_THE_MODEL,
    "mellum": replace(
        _BESIDE_THE_MODEL, config=(("layer_types", ["sliding_attention"]), ("mlp_layer_types", ["sparse"]))
    ),
    "ernie4_5_moe": MtpLayout(
        embedding="mtp_emb_norm.0",
        hidden="mtp_hidden_norm.0",
        projection="mtp_linear_proj.0",
        norm=None,
        block="mtp_block.0.",
        # Its layer is dense.
        config=(("moe_layer_start_index", 1), ("moe_layer_end_index", 0)),
    ),
}
"""Layouts by `model_type` of the language model."""
