"""Paths chosen as the text goes: by accepted tokens alone, the path that promises most, and never another text."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import GREEDY
from helpers.reference import Bench
from selfspec.adapters import ADAPTERS
from selfspec.cache.tree import Tree
from selfspec.control import FixedLength
from selfspec.control.controller import Controller
from selfspec.control.costs import Costs
from selfspec.draft import Budget, Draft, EarlyExit, LayerSkip, RowVerdict, Verdict
from selfspec.draft.drafter import Drafter
from selfspec.draft.path_choice import (
    FAMILY,
    ChosenExit,
    ChosenPath,
    ChosenPathProposer,
    ChosenSkips,
    ExitTrial,
    PathTrial,
    Trial,
    Tried,
    use_path,
)
from selfspec.model.gated_view import Point
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.runtime.request import PassRequest, PassResult


def idle(model: PreTrainedModel, *layers: int) -> PreTrainedModel:
    """The model, some of whose layers add nothing."""
    for layer in layers:
        model.model.layers[layer].self_attn.o_proj.weight.data.zero_()
        model.model.layers[layer].mlp.down_proj.weight.data.zero_()
    return model


@pytest.mark.parametrize(
    ("draft", "idle_layers"), [(ChosenSkips(1), [1]), (ChosenSkips(2), [1, 3]), (ChosenExit(1, 3), [1, 2, 3])]
)
def test_layers_that_add_nothing_are_left_out(draft: Drafter, idle_layers: list[int]) -> None:
    # Near enough to no change for a first draft to be accepted now and then.
    model = tiny.llama(initializer_range=0.1, vocab_size=6)
    spec = selfspec.wrap(idle(model, *idle_layers), draft, draft_length=FixedLength(3))
    rounds = [chunk.rows[0] for chunk in spec.stream(tiny.prompt(9) % 6, max_new_tokens=96, **GREEDY)]
    assert all(row.accepted == len(row.draft) for row in rounds[len(rounds) // 2 :])


def verdict(paths: Sequence[list[int] | None]) -> Verdict:
    """Which nodes each row has accepted; None: it has ended before."""
    rows = {
        number: RowVerdict([1, 2], path, len(path) + 1, [1], 0, False, True, ())
        for number, path in enumerate(paths)
        if path is not None
    }
    return Verdict(range(len(paths)), rows, torch.ones(len(paths), 1))


class Rows(SimpleNamespace):
    """Rows of a model whose verification has tried paths."""

    def __init__(self, model: PreTrainedModel, rows: int) -> None:
        runner = SimpleNamespace(depth=tiny.DEPTH, model=model, forget=lambda path: None)
        controller = Controller(Budget.chain(2), costs=Costs(0.5))
        super().__init__(
            runner=runner, running=list(range(rows)), controller=controller, memories={}, tried=None, greedy=True
        )


def learnt(
    model: PreTrainedModel, draft: ChosenPath, chances: Any, paths: Sequence[list[int] | None], choices: Any = None
) -> ChosenPathProposer:
    """What drafts after trials that all said the same."""
    rows: Any = Rows(model, len(paths))
    proposer = draft.begin(rows)
    tokens = torch.ones(len(paths), 2, dtype=torch.long)
    for _ in range(6):
        trial = draft.trial(list(proposer.family), tiny.DEPTH, rows)
        known = torch.tensor(chances)
        columns = 1 + draft.looked_for + len(proposer.family)
        behind = known[..., :1].expand(*known.shape[:-1], columns - known.shape[-1])
        tried = Tried(torch.cat([known, behind], -1), None if choices is None else torch.tensor(choices))
        proposed = Draft(tokens, Tree.chain(2), steps=2, behind=trial)
        proposer.learn(rows, proposed, PassResult(tokens, behind=tried), verdict(paths))
    return proposer


@pytest.mark.parametrize(
    ("said", "paths", "chosen"),
    [
        ([["good", "bad"]], [[]], 3),
        ([["bad", "good"]], [[]], 1),
        ([["bad", "bad"], ["good", "bad"]], [None, []], 3),
        ([["good", "bad"], ["bad", "bad"]], [[], None], 3),
    ],
)
def test_rejected_tokens_and_rows_that_ended_count_for_nothing(
    llama: PreTrainedModel, said: list[list[str]], paths: list[list[int] | None], chosen: int
) -> None:
    # Of the network, and exits at 2, 1 and 3.
    chances = {"good": [1.0, 0.2, 0.1, 0.95], "bad": [1.0, 0.2, 1.0, 0.1]}
    found = learnt(llama, ChosenExit(1, 3), [[chances[each] for each in row] for row in said], paths)
    assert found.chosen == EarlyExit(chosen)


def test_sets_of_rejected_tokens_are_not_taken(llama: PreTrainedModel) -> None:
    leaves_out_3, leaves_out_0 = [[False] * 3 + [True]], [[True] + [False] * 3]
    choices, chances = [[leaves_out_3, leaves_out_0]], [[[1.0, 0.9]] * 2]
    # A set none of whose tokens is accepted is left by what is found after the first.
    for path in ([0], []):
        found = learnt(llama, ChosenSkips(1), chances, [path], choices)
        assert LayerSkip(layers=[3]) in found.family
        assert found.votes[3] > 0 == found.votes[0]


def test_a_family_stays_small_and_keeps_what_drafts(llama: PreTrainedModel) -> None:
    model = tiny.llama(num_hidden_layers=12)
    rows: Any = Rows(model, 1)
    rows.runner.depth = 12
    proposer: Any = ChosenSkips(1).begin(rows)
    tokens = torch.ones(1, 1, dtype=torch.long)
    for layer in (0, 1, 2, 3, 4, 5, 7, 8, 9):
        votes = torch.zeros(1, 1, 1, 12, dtype=torch.bool)
        votes[..., layer] = True
        worth = 0.1 + 0.05 * torch.arange(2.0 + len(proposer.family))
        tried = Tried(worth[None, None], votes)
        draft = Draft(tokens, Tree.chain(1), steps=1, behind=PathTrial(1, False, 1, ()))
        for _ in range(8):
            proposer.learn(rows, draft, PassResult(tokens, behind=tried), verdict([[0]]))
            tried = Tried(worth.new_zeros(1, 1, 2 + len(proposer.family)), votes)
        assert proposer.chosen in proposer.family
    assert len(proposer.family) == FAMILY


def test_programs_of_few_paths_are_kept() -> None:
    forgotten: list[LayerPath] = []
    runner: Any = SimpleNamespace(forget=forgotten.append)
    paths = [LayerSkip(layers=[layer]).path(12) for layer in range(FAMILY + 1)]
    recent: list[LayerPath] = []
    for path in [*paths[:FAMILY], paths[0], paths[FAMILY]]:
        use_path(recent, path, runner)
    assert forgotten == [paths[1]]


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


def tried(model: PreTrainedModel, trial: Trial) -> Tried:
    found = bench(model)
    result = found.runner.run(PassRequest(found.full, found.block, tree=TREE, behind=trial))
    assert found.cache.cursors.tree == TREE
    assert isinstance(result.behind, Tried)
    return result.behind


@torch.no_grad()
def test_each_column_is_a_pass_along_its_path(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    result = tried(model, PathTrial(TOKENS, False, 0, PATHS))
    assert result.chances.shape == (ROWS, TOKENS, 1 + len(PATHS))
    for token in range(TOKENS):
        target = after(model, LayerPath.full(tiny.DEPTH), token)
        for column, skipped in enumerate((frozenset[int](), *PATHS)):
            expected = chance(target, after(model, without(skipped), token))
            assert torch.allclose(result.chances[:, token, column].double(), expected, atol=1e-5)


@torch.no_grad()
def test_exits_are_read_off_the_pass(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    result = tried(model, ExitTrial(TOKENS, False, (3, 1)))
    for token in range(TOKENS):
        target = after(model, LayerPath.full(tiny.DEPTH), token - 1)
        for column, path in enumerate((LayerPath.full(tiny.DEPTH), EarlyExit(3).path(4), EarlyExit(1).path(4))):
            expected = chance(target, after(model, path, token - 1))
            assert torch.allclose(result.chances[:, token, column].double(), expected, atol=1e-5)


@pytest.mark.parametrize("trial", [PathTrial(TOKENS, False, 2, PATHS), ExitTrial(TOKENS, False, (3, 1))], ids=str)
@torch.no_grad()
def test_the_rest_of_the_pass_is_as_ever(architecture: str, trial: Trial) -> None:
    model = tiny.BUILDERS[architecture]()
    plain = bench(model)
    plain.cache.open(TREE)
    expected = plain.runner.run(PassRequest(plain.full, plain.block, taps=(1, "last", "normed")))
    found = bench(model)
    result = found.runner.run(PassRequest(found.full, found.block, taps=(1, "last", "normed"), tree=TREE, behind=trial))
    left = [expected.logits, dict(expected.features), plain.keys_and_values()]
    same = [result.logits, dict(result.features), found.keys_and_values()]
    torch.testing.assert_close(same, left, atol=EXACT, rtol=0)


@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_a_set_of_one_layer_is_that_of_the_nearest_states(seed: int) -> None:
    model = tiny.llama(seed=seed)
    result = tried(model, PathTrial(TOKENS, False, 1, ()))
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
            assert result.found(row, token) == [best]


@torch.no_grad()
def test_a_set_that_is_found_is_worth_what_its_column_says(llama: PreTrainedModel) -> None:
    for most in (1, 2, 3):
        result = tried(llama, PathTrial(1, False, most, ()))
        for row in range(ROWS):
            found = result.found(row, 0)
            assert len(found) == most
            expected = chance(after(llama, LayerPath.full(tiny.DEPTH), 0), after(llama, without(frozenset(found)), 0))
            assert torch.allclose(result.chances[row, 0, most].double(), expected[row], atol=1e-5)


@torch.no_grad()
def test_greedy_decoding_asks_for_the_best_token_besides(llama: PreTrainedModel) -> None:
    sampled, greedy = (tried(llama, PathTrial(TOKENS, each, 0, PATHS)) for each in (False, True))
    agrees = 2 * greedy.chances - sampled.chances
    assert torch.allclose(agrees, agrees.round(), atol=1e-6)
    assert agrees[..., 0].round().eq(1).all()
    assert agrees.round().unique().tolist() == [0, 1]
