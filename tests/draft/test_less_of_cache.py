"""Drafts over less of the cache, a window or the top keys: what a step reads; the target reads all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import GREEDY, stock
from helpers.shrunken import shrunken
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.tree import Tree
from selfspec.cache.view import CHUNK, EVERY, CacheView, TopSlots, Window
from selfspec.draft import (
    CacheWindow,
    EarlyExit,
    LayerSkip,
    LowPrecision,
    TopOfCache,
)
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import parse_draft
from selfspec.model.registry import find_adapter
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner

KEYS = 4 * CHUNK
LATEST, CHUNKS = CHUNK, 3
DRAFTS: dict[str, LayerPathDrafter] = {
    "int8": LowPrecision(),
    "exit": EarlyExit(2),
    "skip set": LayerSkip(attention=[1], mlp=[2]),
}
LONG = 200
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    # Layers with windows beside others, and capped scores.
    "gemma2": {"sliding_window": 16},
    # A number more in each softmax.
    "gpt_oss": {"sliding_window": 16},
    "deepseek_v3": {},
    "gpt2": {"n_positions": 512},
}


# Tokens after which rows choose again, in tests of whole texts: fewer than in earnest.
OFTEN = 16


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.cache.view.EVERY", OFTEN)


def _built(family: str) -> PreTrainedModel:
    return shrunken(family, max_position_embeddings=512, **FAMILIES[family])


@pytest.fixture(scope="module")
def long_llama() -> PreTrainedModel:
    return tiny.llama(max_position_embeddings=1024).double()


@pytest.fixture
def one_layer() -> PreTrainedModel:
    return tiny.llama(num_hidden_layers=1, max_position_embeddings=1024).double()


def test_a_step_sees_the_window() -> None:
    draft = parse_draft("int8+window:512")
    assert repr(draft) == repr(CacheWindow(LowPrecision(8), 512, 4))
    assert isinstance(draft, CacheWindow)
    assert draft.path(4).view == CacheView(window=Window(512, 4))


@pytest.mark.parametrize("kind", [CacheWindow, TopOfCache])
def test_an_exit_over_less_of_the_cache_leaves_nothing_to_resume(kind: Any) -> None:
    assert EarlyExit(2).path(4).resume_point is not None
    assert kind(EarlyExit(2)).path(4).resume_point is None


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
    if path.view.top_keys is not None:
        runner.choose_top(path.view.top_keys, block[:, :1])

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


@torch.no_grad()
@pytest.mark.parametrize("tree", [None, Tree((-1, -1))], ids=["chain", "tree"])
def test_a_step_attends_to_the_top_chunks_and_the_latest_tokens(one_layer: PreTrainedModel, tree: Tree | None) -> None:
    top, ids = TopOfCache(LowPrecision(), KEYS), tiny.prompt(LONG, 2).clamp(min=1)
    # A short text is seen whole.
    assert _attended(one_layer, top, KEYS, 1) == [list(range(KEYS))]
    one_layer.set_attn_implementation("eager")
    last = tiny.prompt(3, 2, seed=5).clamp(min=1)[:, :1]
    weights = one_layer(torch.cat([ids, last], 1), output_attentions=True).attentions[0][1, :, -1, :LONG].sum(0)
    since = (LONG - LATEST) // CHUNK * CHUNK
    mass = weights[:since].unflatten(0, (-1, CHUNK)).sum(-1)
    one_layer.set_attn_implementation("sdpa")
    chunks = sorted(mass.topk(CHUNKS).indices.tolist())
    expected = [slot for chunk in chunks for slot in range(CHUNK * chunk, CHUNK * (chunk + 1))]
    assert chunks != [2, 3, 4]
    assert _attended(one_layer, top, LONG, 3, tree) == [[*expected, *range(since, LONG)]] * 3


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(("draft", "nodes"), [("int8", 3), ("exit", 7), ("skip set", 7)])
def test_greedy_text_over_the_top_is_stock_text(long_llama: PreTrainedModel, draft: str, nodes: int) -> None:
    around = TopOfCache(DRAFTS[draft], KEYS)
    spec = selfspec.wrap(long_llama, around, draft_length=selfspec.FixedLength(3, nodes=nodes))
    for rows, tokens in ((1, LONG), (3, LONG), (1, 20)):
        ids = tiny.prompt(tokens, rows).clamp(min=1)
        output = spec.generate(ids, max_new_tokens=OFTEN + 10, **GREEDY)
        assert torch.equal(output.sequences, stock(long_llama, ids, OFTEN + 10))
        assert output.stats.drafted > 0


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_all_layers_that_see_all_choose_together(family: str) -> None:
    # Layers of gemma2 take turns: the first sees a window.
    full = {"llama": [0, 1, 2, 3], "gemma2": [1, 3]}[family]
    model = _built(family)
    ids, usual = tiny.prompt(301, 2).clamp(min=1), model.config._attn_implementation
    model.set_attn_implementation("eager")
    layers = torch.stack(model(ids, output_attentions=True).attentions)[full]
    model.set_attn_implementation(usual)
    since = (300 - LATEST) // CHUNK * CHUNK
    mass = layers[:, :, :, -1, :since].sum((0, 2)).unflatten(1, (-1, CHUNK)).sum(-1)
    runner, cache = _runner(model, ids[:, :300])
    runner.choose_top(KEYS, ids[:, 300:])
    seen = cache.top(KEYS).seen(since)[:, 2 : 2 + mass.shape[1]] >= 0
    expected = torch.zeros_like(seen).scatter(1, mass.topk(CHUNKS, dim=1).indices, True)
    assert torch.equal(seen, expected)
    assert not torch.equal(seen[0], seen[1])


def test_each_row_chooses_by_its_own_shares_and_in_its_own_time() -> None:
    top = TopSlots(3, KEYS, torch.device("cpu"))
    lengths = [200, 100, 300]
    assert top.due(lengths) == [0, 2]
    shares = torch.zeros(3, 400)
    shares[0, 3 * CHUNK] = shares[0, 0] = shares[0, 1] = 1
    shares[2, [5 * CHUNK, 2 * CHUNK + 1, 7 * CHUNK]] = torch.tensor([1.0, 2.0, 3.0])
    # Behind what is chosen from, nothing counts.
    shares[:, 290:] = 9
    top.choose(shares, lengths, [0, 2])
    assert top.due([200 + EVERY - 1, 129, 300]) == [1]
    assert top.due([200 + EVERY, 128, 300]) == [0]
    seen = top.seen(400)
    assert seen.shape == (3, 2 + 13)
    assert seen[:, 0].tolist() == [5 * CHUNK, 0, 8 * CHUNK]
    assert seen[:, 1].tolist() == [3, 0, 3]
    assert [chunk for chunk in range(13) if seen[2, 2 + chunk] >= 0] == [2, 5, 7]
    assert seen[2, [4, 7, 9]].tolist() == [0, 1, 2]
    assert {0, 3} <= {chunk for chunk in range(13) if seen[0, 2 + chunk] >= 0}
    kept = seen.clone()
    top.join(1)
    assert torch.equal(top.seen(400)[:3], kept)
    assert top.due([200, 100, 300, 200]) == [3]
    top.narrow([2, 3])
    assert torch.equal(top.seen(400)[0], kept[2])
    assert top.due([300, 200]) == [1]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_choose(family: str) -> None:
    model = _built(family)
    ids = tiny.prompt(150, 2).clamp(min=1)
    spec = selfspec.wrap(model, TopOfCache(LowPrecision(), KEYS), draft_length=3)
    assert torch.equal(spec.generate(ids, max_new_tokens=12, **GREEDY).sequences, stock(model, ids, 12))
