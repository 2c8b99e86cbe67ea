"""Any causal LM of `transformers`, tiny and random: built from its own config class, its sizes set by field name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCABULARY = 50
DEPTH = 4
CONTEXT = 128
WINDOW = 6
PAD = 0
FIRST_WORD = 3

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "emb_dim": 32,
    "embedding_size": 32,
    "embed_dim": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "n_inner": 48,
    "dff": 48,
    "ffn_hidden_size": 48,
    "shared_intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "prefix_dense_intermediate_size": 48,
    "dense_intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "hidden_size_per_layer_input": 8,
    "num_hidden_layers": DEPTH,
    "num_layers": DEPTH,
    "n_layer": DEPTH,
    "n_layers": DEPTH,
    "decoder_layers": DEPTH,
    "num_decoder_layers": DEPTH,
    "encoder_layers": DEPTH,
    "encoder_ffn_dim": 48,
    "num_encoder_layers": 1,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "rotary_dim": 8,
    "dim_head": 8,
    "kv_channels": 8,
    "attention_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "qk_head_dim": 12,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_top_k": 2,
    "moe_topk": 2,
    "experts_per_token": 2,
    "num_experts_per_token": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_groups": 1,
    "num_limited_groups": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "max_position_embeddings": CONTEXT,
    "n_positions": CONTEXT,
    "max_seq_len": CONTEXT,
    "max_target_positions": CONTEXT,
    "sliding_window": WINDOW,
    "window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "sliding_window_size": WINDOW,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "is_decoder": True,
    "logit_scale": 1.0,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dropout": 0.0,
    "num_nextn_predict_layers": 0,
    # Of encoders of images and sound, and of what leads from them to the language model.
    "out_hidden_size": 32,
    "projection_dim": 32,
    "projector_hidden_size": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "image_token_embed_dim": 32,
    "base_channels": 32,
    "latent_channels": 32,
    "depth": 2,
}


def _sections(*sections: int) -> dict[str, Any]:
    """Rotary parameters of positions in several sections: of time, height and width."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}


_MOST_PARAMETERS = 10_000_000
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": ...}
_OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1, 3]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
    },
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_d_state": 8},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [48] * DEPTH,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
        "laurel_rank": 4,
    },
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_unified_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "mamba_d_state": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    # With fewer, what it computes in float32 shows in fp64.
    "qwen3_next": {"linear_num_key_heads": ..., "linear_num_value_heads": ...},
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "xmod": {"languages": ["en"], "default_language": "en"},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [24, 16], "rope_parameters": _sections(1, 1, 2)},
    "ernie4_5_vl_moe_vision": {"depth": 2},
    "glm4v_moe_text": {"rope_parameters": {**_sections(1, 1, 0), "partial_rotary_factor": 0.5}},
    "glm4v_text": {"rope_parameters": _sections(2, 1, 1)},
    "glm_ocr_text": {"rope_parameters": _sections(2, 1, 1)},
    "hunyuan_vl_text": {"rope_parameters": _sections(1, 1, 1, 1)},
    "molmo2_adapter": {"vision_feature_layer": [2, 1], "text_hidden_size": 32},
    "paddleocr_vl_text": {"rope_parameters": _sections(2, 1, 1)},
    "qwen2_5_omni_text": {"rope_parameters": _sections(2, 1, 1)},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 46},
    "qwen2_5_vl_text": {"rope_parameters": _sections(2, 1, 1)},
    "qwen2_5_vl_vision": {"window_size": 112},
    "qwen2_vl_text": {"rope_parameters": _sections(2, 1, 1)},
    "qwen3_omni_moe_text": {"rope_parameters": _sections(2, 1, 1), "sliding_window": None},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 46},
    "qwen3_vl_moe_text": {"rope_parameters": _sections(2, 1, 1), "sliding_window": None},
    "qwen3_vl_text": {"rope_parameters": _sections(2, 1, 1)},
}
"""What the sizes leave wrong, by type; `...` keeps the default of the type."""


def shrunken_config(model_type: str, **options: Any) -> PreTrainedConfig:
    """A tiny config of a type; any field may be given as a keyword."""
    return _config(CONFIG_MAPPING[model_type], model_type, options)


def shrunken(
    model_type: str,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    auto: type[Any] = AutoModelForCausalLM,
    **options: Any,
) -> PreTrainedModel:
    """A tiny random model of a type, in evaluation mode; options are fields of its config."""
    config = shrunken_config(model_type, **options)
    with torch.device("meta"), _without_timm():
        size = auto.from_config(config).num_parameters()
    assert size < _MOST_PARAMETERS, f"{model_type} is not tiny: {size} parameters; name its sizes in _SIZES"
    with torch.random.fork_rng(devices=[]), _without_timm():
        torch.manual_seed(seed)
        model = auto.from_config(config)
        _randomise(model)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # The others have no fp64.
    # No end of text: every test runs to the length it asks for.
    model.generation_config = GenerationConfig(pad_token_id=PAD)
    # Encoders of images may hold complex numbers, which a cast would spoil.
    return (model if model.dtype == dtype else model.to(dtype)).eval()


@contextmanager
def _without_timm() -> Iterator[None]:
    """Leave out encoders of images that are timm's, which reading text alone does not need."""
    made = AutoModel.from_config

    def from_config(config: PreTrainedConfig, **options: Any) -> nn.Module:
        return nn.Identity() if config.model_type in ("gemma3n_vision", "timm_wrapper") else made(config, **options)

    with mock.patch.object(AutoModel, "from_config", from_config):
        yield


def _config(kind: type[PreTrainedConfig], model_type: str, options: dict[str, Any]) -> PreTrainedConfig:
    """Set what `_SIZES` names; a default of `...` in the overrides keeps the type's own."""
    default = kind()
    fields = set(default.to_dict()) | set(getattr(kind, "attribute_map", {}))
    attribute_map = getattr(kind, "attribute_map", {})
    sizes = {attribute_map.get(name, name): value for name, value in _SIZES.items() if name in fields}
    for name, part in vars(default).items():
        if isinstance(part, PreTrainedConfig):
            sizes[name] = _config(type(part), part.model_type, {})
    for name, value in default.to_dict().items():
        if name.endswith("layer_types") and value:
            kinds = list(dict.fromkeys(value))
            sizes[name] = [kinds[index % len(kinds)] for index in range(DEPTH)]
    if "kv_lora_rank" in fields:
        sizes |= _LATENT
    chosen = {**sizes, **_OVERRIDES.get(model_type, {}), **options}
    return kind(**{name: value for name, value in chosen.items() if value is not ...})


def _randomise(model: nn.Module) -> None:
    """Spread logits out, and give norms and biases, which start as ones and zeros, values that show."""
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            nn.init.normal_(weight, mean=1.0 if name.endswith(("weight", "residual")) else 0.0, std=0.1)
        else:
            nn.init.normal_(weight, std=0.3)
