"""Any causal LM of `transformers`, tiny and random: built from its own config class, its sizes set by field name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from helpers.tiny import CONTEXT, DEPTH, VOCABULARY, WINDOW

PAD = 0

_NAMES: tuple[tuple[Any, str], ...] = (
    (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    (32, "hidden_size d_model n_embd dim emb_dim embedding_size embed_dim word_embed_proj_dim"),
    (48, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff ffn_hidden_size"),
    (48, "shared_intermediate_size prefix_dense_intermediate_size dense_intermediate_size intermediate_size_mlp"),
    (24, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
    (8, "hidden_size_per_layer_input"),
    (DEPTH, "num_hidden_layers num_layers n_layer n_layers decoder_layers num_decoder_layers encoder_layers"),
    (1, "num_encoder_layers"),
    (4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads num_decoder_attention_heads"),
    (4, "encoder_attention_heads num_encoder_attention_heads"),
    (2, "num_key_value_heads num_kv_heads"),
    (8, "head_dim global_head_dim rotary_dim dim_head kv_channels attention_head_dim qk_nope_head_dim"),
    (16, "q_lora_rank kv_lora_rank"),
    (4, "qk_rope_head_dim"),
    (10, "v_head_dim"),
    (12, "qk_head_dim"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok moe_k moe_top_k moe_topk experts_per_token num_experts_per_token"),
    (1, "n_group topk_group num_expert_groups num_limited_groups n_shared_experts"),
    (1, "first_k_dense_replace num_dense_layers"),
    (CONTEXT, "max_position_embeddings n_positions max_seq_len max_target_positions"),
    (WINDOW, "sliding_window window_size attention_chunk_size sliding_window_size"),
    (4, "linear_num_heads linear_num_value_heads"),
    (2, "linear_num_key_heads"),
    (8, "linear_head_dim chunk_size mamba_chunk_size"),
    (True, "is_decoder"),
    (1.0, "logit_scale"),
    (0.3, "initializer_range init_std"),
    (PAD, "pad_token_id"),
    (1, "bos_token_id"),
    (2, "eos_token_id"),
    (0.0, "dropout"),
    (0, "num_nextn_predict_layers"),
    # Of encoders of images and sound, and of what leads from them to the language model.
    (32, "out_hidden_size projection_dim projector_hidden_size projector_input_dim projector_output_dim"),
    (32, "image_token_embed_dim base_channels latent_channels"),
    (2, "depth"),
)
_SIZES: dict[str, Any] = {name: size for size, names in _NAMES for name in names.split()}
"""The fields of configs, by what families call them."""


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
    assert size < _MOST_PARAMETERS, f"{model_type} is not tiny: {size} parameters; name its sizes in _NAMES"
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


_IMAGE, _VIDEO, _START = 40, 41, 42

_BY_GRID = ("glm4v", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl")
"""Types that take an image as patches and their grid, and count positions by it."""

PICTURED = (*_BY_GRID, "gemma3", "llava")
"""Types that there is a prompt for."""


@dataclass(frozen=True)
class Pictured:
    """A tiny random model in float32, and what a processor gives for a prompt with an image."""

    model: PreTrainedModel
    inputs: dict[str, Any]

    @property
    def ids(self) -> Tensor:
        """The prompt, `[1, tokens]`."""
        ids: Tensor = self.inputs["input_ids"]
        return ids


def pictured(model_type: str, seed: int = 0) -> Pictured:
    generator = torch.Generator().manual_seed(seed)
    tokens: dict[str, Any] = {"image_token_id": _IMAGE, "image_token_index": _IMAGE}
    if model_type in _BY_GRID:
        tokens |= {"video_token_id": _VIDEO, "vision_start_token_id": _START, "image_start_token_id": _START}
    if model_type == "gemma3":
        tokens["mm_tokens_per_image"] = 4
    model = shrunken(model_type, torch.float32, auto=AutoModelForMultimodalLM, **tokens)
    vision = model.config.vision_config
    if model_type in _BY_GRID:
        pixels = torch.randn(24, 3 * vision.temporal_patch_size * vision.patch_size**2, generator=generator)
        ids = torch.tensor([[5, 6, _START, *[_IMAGE] * 6, 43, 8, 9, 10]])
        beside = {"image_grid_thw": torch.tensor([[1, 4, 6]]), "mm_token_type_ids": (ids == _IMAGE).int()}
        return Pictured(model, {"input_ids": ids, "pixel_values": pixels, **beside})
    pixels = torch.randn(1, 3, vision.image_size, vision.image_size, generator=generator)
    count = 4 if model_type == "gemma3" else (vision.image_size // vision.patch_size) ** 2
    ids = torch.tensor([[5, 6, *[_IMAGE] * count, 8, 9, 10]])
    beside = {"token_type_ids": (ids == _IMAGE).int()} if model_type == "gemma3" else {}
    return Pictured(model, {"input_ids": ids, "pixel_values": pixels, **beside})
