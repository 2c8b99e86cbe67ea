"""Trials of paths: each column gives what a pass along its path gives, and the rest of the pass is as ever."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from helpers import tiny
from helpers.bench import Bench
from selfspec.adapters import ADAPTERS
from selfspec.cache.tree import Tree
from selfspec.draft import EarlyExit
from selfspec.draft.path_choice import ExitTrial, PathTrial, Trial, Tried
from selfspec.model.features import Point
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.runtime.request import PassRequest, PassResult

PAST, BLOCK, TOKENS, ROWS = 5, 4, 2, 2
TREE = Tree.chain(BLOCK - 1)
EXACT = 1e-9
EVERYWHERE: tuple[Point, ...] = (*range(tiny.DEPTH), "last")
PATHS = (frozenset({1}), frozenset({2, 3}), frozenset({0, 2}))


def bench(model: PreTrainedModel) -> Bench:
    adapter = ADAPTERS[model.config.model_type]
    cache = adapter.shared_cache(model, ROWS, limit=PAST + BLOCK, slack=40, device=torch.device("cpu"))
    return Bench(model, adapter, cache, tiny.prompt(PAST + BLOCK, ROWS), PAST)


def without(layers: frozenset[int]) -> LayerPath:
    return LayerPath.without(tiny.DEPTH, {Sublayer(layer, part) for layer in layers for part in Part})


def after(model: PreTrainedModel, path: LayerPath, node: int, taps: tuple[Point, ...] = ()) -> PassResult:
    """A pass along a path over one node, where all before it were read by the whole network."""
    alone = bench(model)
    if node >= 0:
        alone.runner.run(PassRequest(alone.full, alone.block[:, : node + 1]))
    return alone.runner.run(PassRequest(path, alone.block[:, node + 1 : node + 2], first=node, taps=taps))


def chance(p: PassResult, q: PassResult) -> Tensor:
    return torch.minimum(p.logits.softmax(-1), q.logits.softmax(-1)).sum(-1)[:, 0]


def tried(model: PreTrainedModel, trial: Trial, tree: Tree = TREE) -> tuple[Bench, PassResult]:
    found = bench(model)
    return found, found.runner.run(PassRequest(found.full, found.block, tree=tree, behind=trial))


@torch.no_grad()
def test_each_column_is_a_pass_along_its_path(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    _, result = tried(model, PathTrial(TOKENS, False, 0, PATHS))
    assert isinstance(result.behind, Tried)
    assert result.behind.chances.shape == (ROWS, TOKENS, 1 + len(PATHS))
    for token in range(TOKENS):
        target = after(model, LayerPath.full(tiny.DEPTH), token)
        for column, skipped in enumerate((frozenset[int](), *PATHS)):
            expected = chance(target, after(model, without(skipped), token))
            assert torch.allclose(result.behind.chances[:, token, column].double(), expected, atol=1e-5)


@torch.no_grad()
def test_exits_are_read_off_the_pass(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    found, result = tried(model, ExitTrial(TOKENS, False, (3, 1)))
    assert isinstance(result.behind, Tried)
    assert found.cache.tree == TREE
    for token in range(TOKENS):
        target = after(model, LayerPath.full(tiny.DEPTH), token - 1)
        for column, path in enumerate((LayerPath.full(tiny.DEPTH), EarlyExit(3).path(4), EarlyExit(1).path(4))):
            expected = chance(target, after(model, path, token - 1))
            assert torch.allclose(result.behind.chances[:, token, column].double(), expected, atol=1e-5)


@pytest.mark.parametrize("trial", [PathTrial(TOKENS, False, 2, PATHS), ExitTrial(TOKENS, False, (3, 1))], ids=str)
@torch.no_grad()
def test_the_rest_of_the_pass_is_as_ever(architecture: str, trial: Trial) -> None:
    model = tiny.BUILDERS[architecture]()
    plain = bench(model)
    plain.cache.open(TREE)
    expected = plain.runner.run(PassRequest(plain.full, plain.block, taps=(1, "last", "normed")))
    found = bench(model)
    result = found.runner.run(PassRequest(found.full, found.block, taps=(1, "last", "normed"), tree=TREE, behind=trial))
    assert torch.allclose(result.logits, expected.logits, atol=EXACT)
    for point, states in expected.features.items():
        assert torch.allclose(result.features[point], states, atol=EXACT)
    for own, other in zip(found.keys_and_values(), plain.keys_and_values(), strict=True):
        assert all(torch.allclose(one, two, atol=EXACT) for one, two in zip(own, other, strict=True))


@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_a_set_of_one_layer_is_that_of_the_nearest_states(seed: int) -> None:
    model = tiny.llama(seed=seed)
    _, result = tried(model, PathTrial(TOKENS, False, 1, ()))
    assert isinstance(result.behind, Tried)
    for token in range(TOKENS):
        target = after(model, LayerPath.full(tiny.DEPTH), token, EVERYWHERE).features
        ends = [target[layer] for layer in range(1, tiny.DEPTH)] + [target["last"]]
        for row in range(ROWS):
            best = 0
            for layer in range(1, tiny.DEPTH):
                run = after(model, without(frozenset({best})), token, EVERYWHERE).features
                state = run[layer + 1] if layer + 1 < tiny.DEPTH else run["last"]
                own, other = (
                    cosine_similarity(each[row, 0], ends[layer][row, 0], -1) for each in (state, target[layer])
                )
                best = layer if other > own else best
            assert result.behind.found(row, token) == [best]


@torch.no_grad()
def test_a_set_that_is_found_is_worth_what_its_column_says(llama: PreTrainedModel) -> None:
    for most in (1, 2, 3):
        _, result = tried(llama, PathTrial(1, False, most, ()))
        assert isinstance(result.behind, Tried)
        for row in range(ROWS):
            found = result.behind.found(row, 0)
            assert len(found) == most
            expected = chance(after(llama, LayerPath.full(tiny.DEPTH), 0), after(llama, without(frozenset(found)), 0))
            assert torch.allclose(result.behind.chances[row, 0, most].double(), expected[row], atol=1e-5)


@torch.no_grad()
def test_greedy_decoding_asks_for_the_best_token_besides(llama: PreTrainedModel) -> None:
    (_, sampled), (_, greedy) = (tried(llama, PathTrial(TOKENS, each, 0, PATHS)) for each in (False, True))
    assert isinstance(sampled.behind, Tried)
    assert isinstance(greedy.behind, Tried)
    agrees = 2 * greedy.behind.chances - sampled.behind.chances
    assert torch.allclose(agrees, agrees.round(), atol=1e-6)
    assert agrees[..., 0].round().eq(1).all()
    assert agrees.round().unique().tolist() == [0, 1]


def test_nodes_of_a_trial_see_what_their_tokens_see() -> None:
    trial = PathTrial(2, False, 1, (frozenset({1}),))
    assert trial.tree(Tree((-1, 0, 0))).parents == (-1, 0, 0, -1, -1, -1, 0, 0, 0)
    assert trial.tree(Tree((-1, -1))).parents == (-1, -1, -1, -1, -1)
    block = torch.tensor([[9, 4, 5, 6]])
    assert trial.added_to(block, Tree((-1, 0, 0))).tolist() == [[9, 4, 5, 6, 4, 4, 4, 5, 5, 5]]
