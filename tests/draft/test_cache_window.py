"""Drafts over a window of the cache: what a step attends to, and that the target attends to all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.cache.tree import Tree
from selfspec.draft import CacheWindow, EarlyExit, LowPrecision, PromptLookup
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import draft_name, parse_draft
from selfspec.errors import DraftConfigError
from selfspec.model.registry import find_adapter
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner


def around(draft: LayerPathDrafter, recent: int = 5, sinks: int = 2) -> CacheWindow:
    return CacheWindow(draft, recent, sinks)


def _attended(model: PreTrainedModel, window: CacheWindow, read: int, tree: Tree | None) -> list[list[int]]:
    """Positions that the tokens of a draft step attend to after 12 committed ones: where a value's change tells."""
    adapter = find_adapter(model)
    path = window.path(len(adapter.decoder_layers(model)))
    cache = adapter.shared_cache(model, 1, 64, 16, device=torch.device("cpu"))
    runner = ModelRunner(model, adapter, cache)
    cache.reserve(32)
    ids = tiny.prompt(12)
    runner.prefill(ids, [12])
    cache.commit([12])
    tokens = tiny.prompt(read, seed=5)

    def states() -> Tensor:
        if tree is not None:
            cache.open(tree)
        logits = runner.run(PassRequest(path, tokens)).logits[0]
        cache.commit([0])
        return logits

    before, found = states(), []
    for slot in range(12):
        values = cache.layers[0].values
        kept = values[:, :, slot].clone()
        values[:, :, slot] += 1
        found.append((states() != before).any(-1).tolist())
        values[:, :, slot] = kept
    return [[slot for slot in range(12) if found[slot][token]] for token in range(read)]


@pytest.fixture
def one_layer() -> PreTrainedModel:
    return tiny.llama(num_hidden_layers=1)


@torch.no_grad()
def test_a_step_attends_to_sinks_and_the_latest_tokens(one_layer: PreTrainedModel) -> None:
    window = around(LowPrecision(), 5, 2)
    assert _attended(one_layer, window, 3, None) == [[0, 1, 8, 9, 10, 11], [0, 1, 9, 10, 11], [0, 1, 10, 11]]
    # Positions count, not slots: both children of the last token are one behind it.
    children = Tree((-1, -1))
    assert _attended(one_layer, window, 3, children) == [[0, 1, 8, 9, 10, 11], *[[0, 1, 9, 10, 11]] * 2]
    assert _attended(one_layer, around(LowPrecision(), 64, 0), 1, None) == [list(range(12))]


@torch.no_grad()
def test_a_sliding_layer_sees_no_more_than_its_own_window() -> None:
    model = tiny.BUILDERS["mistral"](num_hidden_layers=1)
    assert model.config.sliding_window == tiny.WINDOW == 6
    assert _attended(model, around(LowPrecision(), 3, 2), 1, None) == [[10, 11]]
    assert _attended(model, around(LowPrecision(), 3, 9), 1, None) == [[7, 8, 10, 11]]


def test_an_exit_over_a_window_leaves_nothing_to_resume(llama: PreTrainedModel) -> None:
    assert EarlyExit(2).path(4).resume_point is not None
    assert around(EarlyExit(2)).path(4).resume_point is None
    assert around(EarlyExit(2)).early_exit(4) is None


def test_it_is_written_behind_other_drafts() -> None:
    for name in ("int8+window:512", "exit:4+window:64", "lookup+int8+window:128"):
        assert draft_name(parse_draft(name)) == name
    found = parse_draft("int8+window:512")
    assert isinstance(found, CacheWindow)
    assert (found.recent, found.sinks, found.bits) == (512, 4, 8)


@pytest.mark.parametrize(
    "name",
    [
        "window:512",
        "int8+window",
        "int8+window:",
        "int8+window:-1",
        "lookup+window:9",
        "int8+window:٣",
        f"int8+window:{10**23}",
    ],
)
def test_what_is_written_otherwise_is_refused(name: str) -> None:
    with pytest.raises(DraftConfigError, match=r"window:N|int8\+window:512"):
        parse_draft(name)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CacheWindow(LowPrecision(), 0),
        lambda: CacheWindow(LowPrecision(), 8, -1),
        lambda: CacheWindow(LowPrecision(), True),
        lambda: CacheWindow(LowPrecision(), 10**23),
        lambda: CacheWindow(PromptLookup(), 8),  # type: ignore[arg-type]
        lambda: CacheWindow(CacheWindow(LowPrecision(), 8), 8).path(4),
    ],
)
def test_values_that_make_no_window_are_refused(make: Any) -> None:
    with pytest.raises(DraftConfigError):
        make()


def test_a_model_that_makes_its_masks_itself_is_refused(llama: PreTrainedModel) -> None:
    adapter = replace(find_adapter(llama), ragged="padding")
    with pytest.raises(DraftConfigError, match="draft with int8 alone"):
        selfspec.wrap(llama, around(LowPrecision()), adapter=adapter)
