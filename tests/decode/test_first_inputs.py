"""Soft prompts, as a library puts them on a model while its `generate` runs: a loop of selfspec reads them too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import assert_alike
from helpers.saved_folders import installed  # noqa: F401 - a fixture
from selfspec.compat import OUTPUT_CACHE
from selfspec.errors import UnsupportedOptionError

VIRTUAL = 3
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])

Inputs = dict[str, Any]


def with_columns(inputs: Inputs, rows: int) -> None:
    if inputs.get("attention_mask") is not None:
        inputs["attention_mask"] = torch.cat([torch.ones(rows, VIRTUAL), inputs["attention_mask"]], 1)


def before_embeddings(model: PreTrainedModel, inputs: Inputs) -> None:
    """Virtual tokens in front of the prompt's, and no word on positions."""
    rows = len(inputs["input_ids"])
    with_columns(inputs, rows)
    inputs["position_ids"] = None
    if inputs[OUTPUT_CACHE].get_seq_length() == 0:
        embeddings = model.get_input_embeddings()
        virtual = embeddings(tiny.prompt(VIRTUAL, seed=4)).expand(rows, -1, -1) * 1.5
        inputs["inputs_embeds"] = torch.cat([virtual, embeddings(inputs["input_ids"])], 1)
        inputs["input_ids"] = None


def before_keys(model: PreTrainedModel, inputs: Inputs) -> None:
    """Keys and values of virtual tokens in an otherwise empty cache."""
    rows = len(inputs["input_ids"])
    with_columns(inputs, rows)
    inputs["position_ids"] = inputs["position_ids"] + VIRTUAL
    if inputs[OUTPUT_CACHE].get_seq_length() == 0:
        inputs[OUTPUT_CACHE] = DynamicCache()
        model.model(tiny.prompt(VIRTUAL, seed=4).expand(rows, -1), **{OUTPUT_CACHE: inputs[OUTPUT_CACHE]})


@contextmanager
def prompted(model: PreTrainedModel, change: Callable[[PreTrainedModel, Inputs], None]) -> Iterator[None]:
    own = model.prepare_inputs_for_generation

    def prepare(*args: Any, **kwargs: Any) -> Inputs:
        inputs: Inputs = own(*args, **kwargs)
        change(model, inputs)
        return inputs

    model.prepare_inputs_for_generation = prepare
    try:
        yield
    finally:
        model.prepare_inputs_for_generation = own


@pytest.mark.parametrize(
    "draft", [None, selfspec.drafts.EarlyExit(2), selfspec.drafts.PromptLookup(shortest=1)], ids=str
)
@pytest.mark.parametrize("change", [before_embeddings, before_keys])
def test_a_soft_prompt_is_read(
    llama: PreTrainedModel, change: Callable[[PreTrainedModel, Inputs], None], draft: Any
) -> None:
    spec, ids = selfspec.wrap(llama, draft, draft_length=3), tiny.prompt(5, 2)
    base = llama.generate(ids, **GREEDY)
    with prompted(llama, change):
        assert not torch.equal(assert_alike(spec, inputs=ids, **GREEDY), base)
    # What stays on the model is its own method.
    assert torch.equal(llama.generate(ids, custom_generate=spec, **GREEDY), base)


def test_a_saved_folder_reads_a_soft_prompt(tmp_path: Path) -> None:
    stock = tiny.llama()
    selfspec.wrap(stock, selfspec.drafts.EarlyExit(2), draft_length=3).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    with prompted(stock, before_embeddings), prompted(model, before_embeddings):
        wanted: Tensor = stock.generate(tiny.prompt(5, 2), **GREEDY)
        assert torch.equal(model.generate(tiny.prompt(5, 2), **GREEDY), wanted)


def test_padding_behind_a_prefix_is_left_out(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=3)
    with prompted(llama, before_keys):
        assert_alike(spec, inputs=tiny.prompt(5, 2), attention_mask=MASK, **GREEDY)


@pytest.mark.parametrize(
    ("architecture", "change", "match"),
    [("llama", before_embeddings, "before padded rows"), ("mistral", before_keys, "padding between")],
)
def test_padding_that_would_count_as_text_is_refused(
    architecture: str, change: Callable[[PreTrainedModel, Inputs], None], match: str
) -> None:
    model = tiny.BUILDERS[architecture]()
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    with prompted(model, change), pytest.raises(UnsupportedOptionError, match=match):
        model.generate(tiny.prompt(5, 2), attention_mask=MASK, custom_generate=spec, **GREEDY)


def test_a_filled_cache_beside_a_soft_prompt_is_refused(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=3)
    with prompted(llama, before_keys):
        out = llama.generate(tiny.prompt(5), custom_generate=spec, return_dict_in_generate=True, **GREEDY)
        assert out.cache.get_seq_length() == VIRTUAL + 5 + 11
        more = torch.cat([out.sequences, tiny.prompt(3)], 1)
        with pytest.raises(UnsupportedOptionError, match="a cache beside a soft prompt"):
            llama.generate(more, **{OUTPUT_CACHE: out.cache}, custom_generate=spec, **GREEDY)
