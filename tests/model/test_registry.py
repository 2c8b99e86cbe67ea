"""Adapters are found by the model's own architecture, or by that of the language model inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.pictures import pictured
from helpers.shrunken import shrunken
from selfspec.adapters import ADAPTERS
from selfspec.cache.masks import unknown_layer_types
from selfspec.measure.summary import describe, describe_config
from selfspec.model.checkpoint import load_checkpoint
from selfspec.model.registry import find_adapter

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


@pytest.mark.parametrize(
    ("model_type", "inside", "layers"),
    [
        ("llava", "llama", "model.language_model.layers"),
        ("idefics3", "llama", "model.text_model.layers"),
        # Its language model is inside with its head.
        ("llama4", "llama4_text", "language_model.model.layers"),
        ("fuyu", "persimmon", "model.language_model.layers"),
        ("qwen3_5", "qwen3_5_text", "model.language_model.layers"),
    ],
)
def test_the_adapter_of_the_language_model_inside_is_used(model_type: str, inside: str, layers: str) -> None:
    model = shrunken(model_type, torch.float32, auto=AutoModelForMultimodalLM)
    found = find_adapter(model)
    assert (found.attention, found.mlp, found.layers) == (ADAPTERS[inside].attention, ADAPTERS[inside].mlp, layers)
    found.check(model)
    base = model.get_submodule(found.base(model))
    assert all(module is not model.get_output_embeddings() for module in base.modules())


def _stock(model: PreTrainedModel, prompts: Tensor, **inputs: Tensor) -> Tensor:
    """The stock model's text; the test is skipped where its own `generate` is broken."""
    try:
        text: Tensor = model.generate(prompts, **inputs, **OPTIONS)
    except AttributeError as error:
        pytest.skip(f"{type(model).__name__}.generate of this transformers fails: {error}")
    return text


def test_a_head_inside_the_language_model_drafts_in_fewer_words_and_bits() -> None:
    model = shrunken("llama4", torch.float32, auto=AutoModelForMultimodalLM)
    prompt = torch.tensor([[5, 7, 9, 11]])
    wanted, head = _stock(model, prompt), model.get_output_embeddings()
    for draft in (
        selfspec.drafts.ReducedVocabulary(selfspec.drafts.EarlyExit(2), tuple(range(40))),
        selfspec.drafts.LowPrecision(),
    ):
        out = selfspec.wrap(model, draft, draft_length=3).generate(prompt, **OPTIONS)
        assert torch.equal(out.sequences, wanted)
        assert out.stats.drafted
    assert model.get_output_embeddings() is head


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModelForMultimodalLM])
def test_models_that_read_in_both_directions_are_refused(auto: type[Any]) -> None:
    options: dict[str, Any] = {"use_bidirectional_attention": True} if auto is AutoModelForCausalLM else {}
    model = shrunken("gemma" if options else "paligemma", auto=auto, **options)
    with pytest.raises(selfspec.errors.UnsupportedModelError, match="both directions"):
        selfspec.wrap(model)


def test_layers_whose_tokens_see_something_unknown_are_refused() -> None:
    model = tiny.llama()
    model.config.layer_types = ["full_attention", "reference_sliding_attention"] * 2
    assert unknown_layer_types(model.config) == ["reference_sliding_attention"]
    with pytest.raises(selfspec.errors.UnsupportedModelError, match="reference_sliding_attention"):
        selfspec.wrap(model)


def test_the_attention_kernel_is_that_of_the_language_model() -> None:
    model = shrunken("llava", auto=AutoModelForMultimodalLM)
    model.config.text_config._attn_implementation = "flash_attention_2"
    with pytest.raises(selfspec.errors.UnsupportedModelError, match="flash_attention_2"):
        selfspec.wrap(model)


@pytest.mark.parametrize("model_type", ["llama4", "qwen2_vl", "qwen3_5"])
def test_a_checkpoint_of_text_and_more_is_loaded_and_described(model_type: str, tmp_path: Path) -> None:
    model = shrunken(model_type, torch.float32, auto=AutoModelForMultimodalLM)
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    prompts, mask = torch.randint(3, 40, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    wanted = _stock(model, prompts, attention_mask=mask)
    loaded = load_checkpoint(str(tmp_path)).model
    for spec in (selfspec.wrap(loaded, "exit:2"), selfspec.load(tmp_path, "4GiB", device="cpu")):
        assert torch.equal(spec.generate(prompts, mask, **OPTIONS).sequences, wanted)
    assert describe_config(model.config).total == describe(loaded).total


def test_an_image_within_a_budget_is_refused_by_name(tmp_path: Path) -> None:
    example = pictured("gemma3")
    example.model.save_pretrained(tmp_path)
    spec = selfspec.load(tmp_path, "4GiB", device="cpu")
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="within a budget"):
        spec.generate(**example.inputs, **OPTIONS)
