"""Tiny draft heads with random weights, in the layouts in which heads are published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    Gemma4AssistantConfig,
    Gemma4TextConfig,
    GenerationConfig,
    PreTrainedModel,
)

from helpers import tiny
from helpers.shrunken import shrunken, shrunken_config

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


def layer_shapes(prefix: str, wide: int = 1, inner: int = 48) -> dict[str, tuple[int, ...]]:
    """The shapes of a llama layer's weights, whose attention reads `wide` states."""
    return {
        f"{prefix}.self_attn.q_proj.weight": (HIDDEN, wide * HIDDEN),
        f"{prefix}.self_attn.k_proj.weight": (16, wide * HIDDEN),
        f"{prefix}.self_attn.v_proj.weight": (16, wide * HIDDEN),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{prefix}.mlp.gate_proj.weight": (inner, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (inner, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, inner),
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
    count = min(DRAFTED, vocabulary - 1)
    return torch.randperm(vocabulary, generator=torch.Generator().manual_seed(5))[:count].sort().values


def eagle3(
    folder: Path, model: PreTrainedModel, layout: str = "safeailab", norm: str | None = None, **options: Any
) -> str:
    """Write an EAGLE-3 head for a model of width 32; options are fields of its config.json."""
    vocabulary = model.config.vocab_size
    tokens = drafted_tokens(vocabulary)
    first = "midlayer" if layout == "safeailab" else "layers.0"
    shapes = {
        **layer_shapes(first, wide=2),
        f"{first}.input_layernorm.weight": (HIDDEN,),
        f"{first}.hidden_norm.weight": (HIDDEN,),
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (len(tokens), HIDDEN),
    }
    if norm == "each":
        shapes |= {f"fc_norm.{number}.weight": (HIDDEN,) for number in range(3)}
    if norm == "all":
        shapes["input_norm.weight"] = (3 * HIDDEN,)
    weights = weights_of(shapes)
    weights["d2t"] = tokens - torch.arange(len(tokens))
    weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, tokens, True)
    config = {**llama_config(vocabulary), "draft_vocab_size": len(tokens), "architectures": ["LlamaForCausalLMEagle3"]}
    if layout == "speculators":
        config = {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "transformer_layer_config": llama_config(vocabulary),
            "draft_vocab_size": len(tokens),
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/base"}},
        }
    if norm is not None:
        config["fc_norm" if norm == "each" else "norm_before_fc"] = True
    return write(folder, {**config, **options}, weights)


def dflash(
    folder: Path, model: PreTrainedModel, layout: str = "authors", kind: str = "qwen3", layers: int = 2, **options: Any
) -> str:
    """Write a DFlash head of blocks of 4, as its authors or the speculators library do."""
    vocabulary = model.config.vocab_size
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for layer in range(layers):
        shapes |= {**layer_shapes(f"layers.{layer}"), f"layers.{layer}.input_layernorm.weight": (HIDDEN,)}
        if kind == "qwen3":
            shapes |= {f"layers.{layer}.self_attn.{part}_norm.weight": (8,) for part in "qk"}
    config: dict[str, Any] = {**llama_config(vocabulary), "model_type": kind, "num_hidden_layers": layers}
    config |= {"head_dim": 8, "attention_bias": False}
    if layout == "authors":
        own = {"mask_token_id": 3, "target_layer_ids": [0, 2]}
        return write(
            folder,
            {**config, "architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": own, **options},
            weights_of(shapes),
        )
    tokens = drafted_tokens(vocabulary)
    weights = weights_of({**shapes, "lm_head.weight": (len(tokens), HIDDEN)})
    weights["d2t"] = tokens - torch.arange(len(tokens))
    fields = {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"], "block_size": 4}
    points = {"aux_hidden_state_layer_ids": [1, 3], "mask_token_id": 3, "transformer_layer_config": config}
    return write(folder, {**fields, **points, **options}, weights)


def eagle1(folder: Path, model: PreTrainedModel, bias: bool = True) -> str:
    """Write an EAGLE-1 head, as SafeAILab does."""
    shapes = {**layer_shapes("layers.0"), "fc.weight": (HIDDEN, 2 * HIDDEN), **({"fc.bias": (HIDDEN,)} if bias else {})}
    weights = weights_of(shapes)
    weights["embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
    return write(folder, {**llama_config(model.config.vocab_size), "architectures": ["LlamaForCausalLM"]}, weights)


@dataclass(frozen=True)
class MtpCheckpoint:
    """A checkpoint with modules for multi-token prediction: of each a model of its one layer, and its other weights."""

    model: PreTrainedModel
    blocks: list[PreTrainedModel]
    weights: list[dict[str, Tensor]]


_BEHIND = {
    "embedding": "model.layers.{n}.enorm",
    "hidden": "model.layers.{n}.hnorm",
    "projection": "model.layers.{n}.eh_proj",
    "norm": "model.layers.{n}.shared_head.norm",
    "block": "model.layers.{n}.",
}
_BESIDE = {
    "embedding": "mtp.pre_fc_norm_embedding",
    "hidden": "mtp.pre_fc_norm_hidden",
    "projection": "mtp.fc",
    "norm": "mtp.norm",
    "block": "mtp.layers.{i}.",
}
MTP: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "deepseek_v3": (_BEHIND, {"first_k_dense_replace": 0}),
    "glm4_moe": (_BEHIND, {"first_k_dense_replace": 0}),
    "glm4_moe_lite": (_BEHIND, {"mlp_layer_types": ["sparse"]}),
    "hy_v3": ({**_BEHIND, "norm": "model.layers.{n}.final_layernorm"}, {"mlp_layer_types": ["sparse"]}),
    "mimo_v2_flash": (
        {
            "embedding": "model.mtp.layers.{i}.enorm",
            "hidden": "model.mtp.layers.{i}.hnorm",
            "projection": "model.mtp.layers.{i}.eh_proj",
            "norm": "model.mtp.layers.{i}.final_layernorm",
            "block": "model.mtp.layers.{i}.",
        },
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
    ),
    "step3p7": (
        _BEHIND,
        {
            "layer_types": ["sliding_attention"],
            "mlp_layer_types": ["dense"],
            "num_sliding_attention_heads": 8,
            "num_nextn_predict_layers": 0,
        },
    ),
    "glm4v_moe": (
        {part: place.replace("model.", "model.language_model.") for part, place in _BEHIND.items()},
        {"first_k_dense_replace": 0},
    ),
    "qwen3_next": (_BESIDE, {"layer_types": ["full_attention"]}),
    "qwen3_5_text": (_BESIDE, {"layer_types": ["full_attention"]}),
    "qwen3_5_moe_text": (_BESIDE, {"layer_types": ["full_attention"]}),
    "qwen2": (
        {
            "embedding": "model.mtp_layers.{i}.token_layernorm",
            "hidden": "model.mtp_layers.{i}.hidden_layernorm",
            "projection": "model.mtp_layers.{i}.input_proj",
            "norm": "model.mtp_layers.{i}.final_layernorm",
            "block": "model.mtp_layers.{i}.",
        },
        {"layer_types": ["full_attention"]},
    ),
    "mellum": (_BESIDE, {"layer_types": ["sliding_attention"], "mlp_layer_types": ["sparse"]}),
    "ernie4_5_moe": (
        {
            "embedding": "model.mtp_emb_norm.{i}",
            "hidden": "model.mtp_hidden_norm.{i}",
            "projection": "model.mtp_linear_proj.{i}",
            "block": "model.mtp_block.{i}.",
        },
        {"moe_layer_start_index": 1, "moe_layer_end_index": 0},
    ),
}
"""By type, what checkpoints call the parts, and how the config of the module's layer differs from the model's."""


# Of models of text and more, the type of their language model.
_INSIDE = {"step3p7": "step3p5", "glm4v_moe": "glm4v_moe_text"}


def _shrunken(kind: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A tiny model; options are fields of its language model's config."""
    if kind not in _INSIDE:
        return shrunken(kind, seed=seed, **options)
    text = shrunken_config(_INSIDE[kind], **options)
    return shrunken(kind, seed=seed, auto=AutoModelForMultimodalLM, text_config=text)


def mtp(folder: Path, kind: str, modules: int = 1, **options: Any) -> MtpCheckpoint:
    """Write a tiny checkpoint of a type with modules for multi-token prediction; options are fields of its config."""
    places, differences = MTP[kind]
    behind: dict[str, Any] = {}
    if kind == "step3p7":
        # The lists of its config go on over its modules.
        kinds = {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"]}
        behind = {name: two * 2 + differences[name] * modules for name, two in kinds.items()}
        behind |= {"num_nextn_predict_layers": modules, "num_sliding_attention_heads": 8}
    if kind == "qwen3_next":
        # States of the usual size take most of the time.
        behind = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    _shrunken(kind, **behind, **options).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    blocks, parts = [], []
    for module in range(modules):
        names = {part: place.format(i=module, n=4 + module) for part, place in places.items()}
        block = _shrunken(kind, seed=1 + module, **{"num_hidden_layers": 1, **options, **differences})
        block.save_pretrained(folder / "block")
        shapes = {"embedding": (HIDDEN,), "hidden": (HIDDEN,), "projection": (HIDDEN, 2 * HIDDEN)}
        # Some share what lies around their layers.
        own = weights_of(shapes, seed=module if "{" in places["embedding"] else 0)
        # As those that shrunken makes.
        for part in ("embedding", "hidden"):
            own[part] = own[part].abs() + 0.5
        if kind == "step3p7":
            vocabulary = len(block.get_output_embeddings().weight)
            own |= weights_of({"head": (vocabulary, HIDDEN)}, seed=9 + module)
            names["head"] = f"model.layers.{4 + module}.shared_head.head"
        for name, weight in load_file(folder / "block" / "model.safetensors").items():
            inside = name.removeprefix("model.").removeprefix("language_model.")
            if inside.startswith("layers.0."):
                end = inside.removeprefix("layers.0.")
                if kind == "mimo_v2_flash":
                    end = end.replace("post_attention_layernorm", "pre_mlp_layernorm")
                weights[names["block"] + end] = weight
            if inside == "norm.weight" and "norm" in names:
                shared = weights.setdefault(f"{names['norm']}.weight", weight)
                block.get_decoder().get_submodule("norm").load_state_dict({"weight": shared})
        weights |= {f"{names[part]}.weight": weight for part, weight in own.items()}
        blocks.append(block)
        parts.append(own)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    shutil.rmtree(folder / "block")
    loader: Any = AutoModelForMultimodalLM if kind in _INSIDE else AutoModelForCausalLM
    model = loader.from_pretrained(folder).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # The others have no fp64.
    model.generation_config = GenerationConfig(pad_token_id=0)
    return MtpCheckpoint(model, blocks, parts)


def medusa(folder: Path, model: PreTrainedModel, heads: int = 3, blocks: int = 1, pickled: bool = True) -> str:
    """Write Medusa heads, as FasterDecoding does."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for block in range(blocks):
            shapes |= {f"{head}.{block}.linear.weight": (HIDDEN, HIDDEN), f"{head}.{block}.linear.bias": (HIDDEN,)}
        shapes[f"{head}.{blocks}.weight"] = (model.config.vocab_size, HIDDEN)
    weights = weights_of(shapes)
    config = {"medusa_num_heads": heads, "medusa_num_layers": blocks, "base_model_name_or_path": "some/base"}
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, folder / "medusa_lm_head.pt")
    else:
        save_file(weights, folder / "model.safetensors")
    return str(folder)


def hydra(folder: Path, model: PreTrainedModel, heads: int = 3, blocks: int = 2, grounded: bool = True) -> str:
    """Write Hydra heads with a prefix layer, as their authors do."""
    vocabulary = model.config.vocab_size
    prefix = "prefix_embeding_layer"
    shapes = {
        **layer_shapes(f"{prefix}.layers.0", inner=model.config.intermediate_size),
        f"{prefix}.layers.0.input_layernorm.weight": (HIDDEN,),
        f"{prefix}.norm.weight": (HIDDEN,),
        f"{prefix}.embed_tokens.weight": (vocabulary, HIDDEN),
    }
    for head in range(heads):
        read = HIDDEN * (head + 2) if grounded else HIDDEN
        shapes[f"hydra_mlp.{head}.1.linear.weight"] = (HIDDEN, read)
        shapes[f"hydra_mlp.{head}.1.linear.bias"] = (HIDDEN,)
        if grounded:
            shapes[f"hydra_mlp.{head}.1.res_connection.weight"] = (HIDDEN, read)
            shapes[f"hydra_mlp.{head}.1.res_connection.bias"] = (HIDDEN,)
        for block in range(1, blocks):
            shapes[f"hydra_mlp.{head}.{2 * block + 1}.linear.weight"] = (HIDDEN, HIDDEN)
            shapes[f"hydra_mlp.{head}.{2 * block + 1}.linear.bias"] = (HIDDEN,)
        shapes[f"hydra_lm_head.{head}.1.weight"] = (vocabulary, HIDDEN)
        shapes[f"hydra_lm_head.{head}.1.bias"] = (vocabulary,)
    config = {"hydra_num_heads": heads, "hydra_num_layers": blocks, "hydra_head_arch": "prefix-mlp"}
    write(folder, config, {})
    (folder / "model.safetensors").unlink()
    torch.save(weights_of(shapes), folder / "hydra_lm_head.pt")
    return str(folder)


def queries(folder: Path, model: PreTrainedModel, groups: bool = False, **options: Any) -> str:
    """Write an assistant with random weights for a tiny Gemma 4."""
    own = model.config.get_text_config().to_dict()
    text = {
        **own,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "per_layer_config": {"1": own["per_layer_config"]["3"]},
        "use_double_wide_mlp": False,
        **options,
    }
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**text),
        backbone_hidden_size=own["hidden_size"],
        use_ordered_embeddings=groups,
        num_centroids=10,
        centroid_intermediate_top_k=3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        assistant = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        for weight in assistant.parameters():
            torch.nn.init.normal_(weight, std=0.3)
        if groups:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(own["vocab_size"]))
    assistant.save_pretrained(folder)
    return str(folder)


WRITERS: dict[str, Callable[[Path, PreTrainedModel], str]] = {
    "eagle1": eagle1,
    "eagle3": eagle3,
    "medusa": medusa,
    "hydra": hydra,
    "dflash": dflash,
}
FAMILIES = (*WRITERS, "mtp")
"""Kinds of heads, as `with_head` names them."""


def with_head(kind: str, folder: Path, **options: Any) -> tuple[PreTrainedModel, str]:
    """Make a tiny model in float64 and a head for it, and return the model and the name of the draft."""
    if kind == "mtp":
        return mtp(folder, "glm4_moe", **options).model, "mtp"
    model = tiny.llama(num_hidden_layers=6, **options)
    return model, f"{kind.rstrip('13')}:{WRITERS[kind](folder, model)}"
