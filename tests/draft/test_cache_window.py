"""Drafts over a window of the cache: what a step reads; the target reads all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers import tiny
from selfspec.cache.masks import Window
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.tree import Tree
from selfspec.draft import CacheWindow, EarlyExit, LowPrecision
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import parse_draft
from selfspec.model.registry import find_adapter
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner


@pytest.fixture
def one_layer() -> PreTrainedModel:
    return tiny.llama(num_hidden_layers=1, max_position_embeddings=1024).double()


def test_a_step_sees_the_window() -> None:
    draft = parse_draft("int8+window:512")
    assert repr(draft) == repr(CacheWindow(LowPrecision(8), 512, 4))
    assert isinstance(draft, CacheWindow)
    assert draft.path(4).window == Window(512, 4)


def test_an_exit_over_less_of_the_cache_leaves_nothing_to_resume() -> None:
    assert EarlyExit(2).path(4).resume_point is not None
    assert CacheWindow(EarlyExit(2)).path(4).resume_point is None


def _runner(model: PreTrainedModel, ids: Tensor) -> tuple[ModelRunner, SharedCache]:
    adapter = find_adapter(model)
    rows, tokens = ids.shape
    cache = adapter.shared_cache(model, rows, 2 * tokens + 16, 16, device=torch.device("cpu"))
    runner = ModelRunner(model, adapter, cache)
    cache.cursors.reserve(tokens + 16)
    runner.prefill(ids, [tokens] * rows)
    cache.commit([tokens] * rows)
    return runner, cache


def _attended(
    model: PreTrainedModel, draft: LayerPathDrafter, tokens: int, read: int, tree: Tree | None = None
) -> list[list[int]]:
    """Slots that the tokens of a draft step attend to in the second of two rows: where a value's change tells."""
    runner, cache = _runner(model, tiny.prompt(tokens, 2).clamp(min=1))
    path, block = draft.path(runner.depth), tiny.prompt(read, 2, seed=5).clamp(min=1)

    def states() -> Tensor:
        if tree is not None:
            cache.open(tree)
        logits = runner.run(PassRequest(path, block)).logits[1]
        cache.commit([0, 0])
        return logits

    before, found = states(), []
    for slot in range(tokens):
        values = cache.layers[0].values
        kept = values[1, :, slot].clone()
        values[1, :, slot] += 1e4
        found.append((states() != before).any(-1).tolist())
        values[1, :, slot] = kept
    return [[slot for slot in range(tokens) if found[slot][token]] for token in range(read)]


@torch.no_grad()
def test_a_step_attends_to_sinks_and_the_latest_tokens(one_layer: PreTrainedModel) -> None:
    window = CacheWindow(LowPrecision(), 5, 2)
    assert _attended(one_layer, window, 12, 3) == [[0, 1, 8, 9, 10, 11], [0, 1, 9, 10, 11], [0, 1, 10, 11]]
    # Positions count, not slots: both children of the last token are one behind it.
    children = Tree((-1, -1))
    assert _attended(one_layer, window, 12, 3, children) == [[0, 1, 8, 9, 10, 11], *[[0, 1, 9, 10, 11]] * 2]
    assert _attended(one_layer, CacheWindow(LowPrecision(), 64, 0), 12, 1) == [list(range(12))]


@torch.no_grad()
def test_a_sliding_layer_sees_no_more_than_its_own_window() -> None:
    model = tiny.BUILDERS["mistral"](num_hidden_layers=1)
    assert model.config.sliding_window == tiny.WINDOW == 6
    assert _attended(model, CacheWindow(LowPrecision(), 3, 2), 12, 1) == [[10, 11]]
    assert _attended(model, CacheWindow(LowPrecision(), 3, 9), 12, 1) == [[7, 8, 10, 11]]
