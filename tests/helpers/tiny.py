"""Tiny random models, one builder per architecture: fp64, evaluation mode, weights large enough for spread-out logits.

Every builder takes any field of its config as a keyword (`num_hidden_layers=6`), and
besides these `dtype`, `seed` and `attention` (the kernel: "sdpa" or "eager"). Equal arguments give equal weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BitNetConfig,
    BitNetForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from selfspec.formats.planes import Planes
from selfspec.placement.packed import fill
from selfspec.placement.stored import WeightFiles

VOCABULARY = 50
DEPTH = 4
CONTEXT = 128
WINDOW = 6

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def llama(**options: Any) -> PreTrainedModel:
    """Grouped-query llama."""
    return _built(LlamaConfig, LlamaForCausalLM, _SIZES, options)


@torch.no_grad()
def as_good_as_the_target() -> PreTrainedModel:
    """Llama whose last layer adds nothing, so that the exit before it gives the target's own logits."""
    model = llama()
    model.model.layers[3].self_attn.o_proj.weight.zero_()
    model.model.layers[3].mlp.down_proj.weight.zero_()
    return model


def mistral(**options: Any) -> PreTrainedModel:
    """Mistral with a sliding window shorter than the texts of the tests."""
    return _built(MistralConfig, MistralForCausalLM, {**_SIZES, "head_dim": 8, "sliding_window": WINDOW}, options)


def qwen2(**options: Any) -> PreTrainedModel:
    """Qwen2 whose first two layers look at all and whose others slide."""
    sliding = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    return _built(Qwen2Config, Qwen2ForCausalLM, {**_SIZES, **sliding}, options)


def qwen3(**options: Any) -> PreTrainedModel:
    return _built(Qwen3Config, Qwen3ForCausalLM, {**_SIZES, "head_dim": 8}, options)


def gpt2(**options: Any) -> PreTrainedModel:
    """GPT-2: learned positions, no grouped queries, tied head."""
    sizes = {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_inner": 48,
        "n_layer": DEPTH,
        "n_head": 4,
        "n_positions": CONTEXT,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return _built(GPT2Config, GPT2LMHeadModel, sizes, options)


def bitnet(**options: Any) -> PreTrainedModel:
    """BitNet with plain linears."""
    return _built(BitNetConfig, BitNetForCausalLM, _SIZES, options)


BUILDERS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gpt2": gpt2,
    "bitnet": bitnet,
}
"""Every builder by the `model_type` of what it builds."""


def prompt(length: int, batch: int = 1, seed: int = 0, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Random token ids, `[batch, length]`."""
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tokenizer(*merges: tuple[str, str]) -> PreTrainedTokenizerBase:
    """A tokenizer whose tokens are single bytes and pairs of them; models that read it need a vocabulary of 256."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=built, pad_token="!", eos_token="!")


def _built(
    config_class: type[PreTrainedConfig],
    model_class: type[PreTrainedModel],
    sizes: dict[str, Any],
    options: dict[str, Any],
) -> PreTrainedModel:
    dtype = options.pop("dtype", torch.float64)
    seed = options.pop("seed", 0)
    attention = options.pop("attention", "sdpa")
    renamed = {getattr(config_class, "attribute_map", {}).get(name, name): value for name, value in options.items()}
    config = config_class(**{**sizes, **renamed}, attn_implementation=attention)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        # Norms and biases start as ones and zeros; a mistake in them must show too.
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                torch.nn.init.normal_(weight, mean=1.0 if name.endswith("weight") else 0.0, std=0.1)
    model.generation_config = GenerationConfig.from_model_config(config)
    return model.to(dtype).eval()


def in_turns(
    *axes: Collection[Any], mark: pytest.MarkDecorator = pytest.mark.contract, slow: Collection[str] = ()
) -> list[Any]:
    """Combine the values of axes, or dictionaries of them by name, for `parametrize`.

    Each combination of all but the last is in the plain tier once, unless its first is `slow`, with the last in turns.
    """
    named = [
        list(axis.items()) if isinstance(axis, dict) else [(_name(value), value) for value in axis] for axis in axes
    ]
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in named)):
        values = [axis[place] for axis, place in zip(named, places, strict=True)]
        cases.append(
            pytest.param(
                *(value for _, value in values),
                id="-".join(name for name, _ in values),
                marks=mark if sum(places) % len(named[-1]) or values[0][0] in slow else (),
            )
        )
    return cases


def _name(value: Any) -> str:
    # Addresses in a name would differ between the processes of one run.
    return getattr(value, "__name__", str(value))


def hold_planes(model: PreTrainedModel) -> None:
    """Let a model that is in memory hold its weights in planes, as a checkpoint that is loaded so does."""
    fill(model, Planes(), {name: weight.detach for name, weight in model.named_parameters()}, WeightFiles())
