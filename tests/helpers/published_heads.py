"""Tiny draft heads with random weights, in the layouts in which heads are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

HIDDEN = 32
DRAFTED = 20


def weights_of(shapes: dict[str, tuple[int, ...]], seed: int = 0, scale: float = 0.3) -> dict[str, Tensor]:
    """Random weights; those of norms are near 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * (0.1 if len(shape) == 1 else scale)
        + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def layer_shapes(prefix: str, wide: int = 1) -> dict[str, tuple[int, ...]]:
    """The shapes of a llama layer's weights, whose attention reads `wide` states."""
    return {
        f"{prefix}.self_attn.q_proj.weight": (HIDDEN, wide * HIDDEN),
        f"{prefix}.self_attn.k_proj.weight": (16, wide * HIDDEN),
        f"{prefix}.self_attn.v_proj.weight": (16, wide * HIDDEN),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{prefix}.mlp.gate_proj.weight": (48, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (48, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, 48),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
    }


def llama_config(vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "vocab_size": vocabulary,
    }


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def drafted_tokens(vocabulary: int) -> Tensor:
    """Which ids of the target a head with fewer tokens drafts, in order."""
    return torch.randperm(vocabulary, generator=torch.Generator().manual_seed(5))[:DRAFTED].sort().values


def eagle3(
    folder: Path, model: PreTrainedModel, layout: str = "safeailab", norm: str | None = None, **options: Any
) -> str:
    """Write an EAGLE-3 head for a model of width 32; options are fields of its config.json."""
    vocabulary = model.config.vocab_size
    first = "midlayer" if layout == "safeailab" else "layers.0"
    shapes = {
        **layer_shapes(first, wide=2),
        f"{first}.input_layernorm.weight": (HIDDEN,),
        f"{first}.hidden_norm.weight": (HIDDEN,),
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFTED, HIDDEN),
    }
    if norm == "each":
        shapes |= {f"fc_norm.{number}.weight": (HIDDEN,) for number in range(3)}
    if norm == "all":
        shapes["input_norm.weight"] = (3 * HIDDEN,)
    weights = weights_of(shapes)
    tokens = drafted_tokens(vocabulary)
    weights["d2t"] = tokens - torch.arange(DRAFTED)
    weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, tokens, True)
    config = {**llama_config(vocabulary), "draft_vocab_size": DRAFTED, "architectures": ["LlamaForCausalLMEagle3"]}
    if layout == "speculators":
        config = {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "transformer_layer_config": llama_config(vocabulary),
            "draft_vocab_size": DRAFTED,
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/base"}},
        }
    if norm is not None:
        config["fc_norm" if norm == "each" else "norm_before_fc"] = True
    return write(folder, {**config, **options}, weights)


def eagle1(folder: Path, model: PreTrainedModel, bias: bool = True) -> str:
    """Write an EAGLE-1 head, as SafeAILab does."""
    shapes = {**layer_shapes("layers.0"), "fc.weight": (HIDDEN, 2 * HIDDEN), **({"fc.bias": (HIDDEN,)} if bias else {})}
    weights = weights_of(shapes)
    weights["embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
    return write(folder, {**llama_config(model.config.vocab_size), "architectures": ["LlamaForCausalLM"]}, weights)
