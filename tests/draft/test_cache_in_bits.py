"""Drafts over keys and values in fewer bits: greedy text and joints are the target's, and odd wishes are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import GREEDY, stock
from selfspec.decode.generation import Limits
from selfspec.draft import CacheInBits, CacheWindow, EarlyExit, LowPrecision, PromptLookup
from selfspec.draft.registry import draft_name, parse_draft
from selfspec.errors import DraftConfigError
from selfspec.model.registry import find_adapter


@pytest.mark.parametrize("runtime", [None, selfspec.runtime.Eager()], ids=["default", "eager"])
def test_behind_prompts_of_one_token_nothing_is_copied_yet(runtime: selfspec.runtime.Runtime | None) -> None:
    model = tiny.mistral(dtype=torch.float64)
    for rows in (1, 2):
        ids, found = tiny.prompt(1, rows).clamp(min=1), {}
        for draft in ("int8", "int8+kv8"):
            output = selfspec.wrap(model, draft, draft_length=3, runtime=runtime).generate(
                ids, max_new_tokens=24, **GREEDY
            )
            assert torch.equal(output.sequences, stock(model, ids, 24))
            found[draft] = output.stats.mean_accepted_length
        assert found["int8+kv8"] > found["int8"] - 0.5


def test_an_exit_over_a_copy_leaves_nothing_to_resume() -> None:
    assert CacheInBits(EarlyExit(2)).path(4).resume_point is None
    assert CacheInBits(EarlyExit(2)).early_exit(4) is None


def test_it_is_written_behind_other_drafts() -> None:
    for name in ("int8+kv4", "exit:4+kv8", "lookup+int8+kv4", "int8+window:512+kv4"):
        assert draft_name(parse_draft(name)) == name
    found = parse_draft("int8+kv8")
    assert isinstance(found, CacheInBits)
    assert (found.cache_bits, found.bits) == (8, 8)
    both = parse_draft("int8+window:512+kv4")
    assert isinstance(both, CacheInBits)
    path = both.path(4)
    assert path.view.window is not None
    assert path.view.bits == 4


@pytest.mark.parametrize("name", ["kv4", "int8+kv4:2", "lookup+kv4"])
def test_what_is_written_otherwise_is_refused(name: str) -> None:
    with pytest.raises(DraftConfigError, match=r"kv4|int8\+kv4"):
        parse_draft(name)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CacheInBits(LowPrecision(), 2),  # type: ignore[arg-type]
        lambda: CacheInBits(LowPrecision(), True),  # type: ignore[arg-type]
        lambda: CacheInBits(PromptLookup()),  # type: ignore[arg-type]
        lambda: CacheInBits(CacheInBits(LowPrecision())).path(4),
        lambda: CacheInBits(CacheWindow(CacheInBits(LowPrecision()), 8)).path(4),
    ],
)
def test_values_that_make_no_copy_are_refused(make: Any) -> None:
    with pytest.raises(DraftConfigError):
        make()


def test_a_model_that_makes_its_masks_itself_is_refused(llama: PreTrainedModel) -> None:
    adapter = replace(find_adapter(llama), ragged="padding")
    with pytest.raises(DraftConfigError, match="draft with int8 alone"):
        selfspec.wrap(llama, CacheInBits(LowPrecision()), adapter=adapter)


@pytest.mark.parametrize("draft", ["int8+kv4", "int8+kv4+window:8", "lookup+int8+kv4"])
def test_a_cache_in_8_bits_is_refused_before_any_pass(llama: PreTrainedModel, draft: str) -> None:
    spec = selfspec.wrap(llama, draft)
    spec.limits = Limits(1000, 1000, "int8")
    with pytest.raises(DraftConfigError, match="cache='int8'"):
        spec.generate(tiny.prompt(5), max_new_tokens=4, do_sample=False)


def test_its_bytes_of_a_token_are_told(llama: PreTrainedModel) -> None:
    config = llama.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    own = CacheInBits(LowPrecision(), 8).own_bytes(llama)
    assert own.of_token == own.copies == numbers + 8 * numbers // config.head_dim
    assert own.token == 0
    assert CacheWindow(CacheInBits(LowPrecision(), 8), 8).own_bytes(llama) == own
