"""Paths chosen as the text goes: by accepted tokens alone, the path that promises most, and never another text."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import GREEDY
from selfspec.cache.tree import Tree
from selfspec.control import CostAware, FixedLength
from selfspec.control.controller import Controller
from selfspec.control.costs import Costs
from selfspec.draft import (
    Budget,
    Draft,
    EarlyExit,
    LayerSkip,
    RowVerdict,
    Verdict,
)
from selfspec.draft.drafter import Drafter
from selfspec.draft.path_choice import (
    FAMILY,
    ChosenExit,
    ChosenPath,
    ChosenPathProposer,
    ChosenSkips,
    PathTrial,
    RecentPaths,
    Tried,
)
from selfspec.errors import DraftConfigError
from selfspec.model.layer_path import LayerPath
from selfspec.runtime.request import PassResult

DRAFTS = {"clasp": ChosenSkips(2), "del": ChosenExit(1, 3)}


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
        behind = known[..., :1].expand(*known.shape[:-1], trial.columns - known.shape[-1])
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
    rows: Any = SimpleNamespace(runner=SimpleNamespace(forget=forgotten.append))
    paths = [LayerSkip(layers=[layer]).path(12) for layer in range(FAMILY + 1)]
    recent = RecentPaths()
    for path in [*paths[:FAMILY], paths[0], paths[FAMILY]]:
        recent.use(path, rows)
    assert forgotten == [paths[1]]


def test_a_seed_gives_the_same_tokens_again(llama: PreTrainedModel) -> None:
    for draft in DRAFTS.values():
        spec = selfspec.wrap(llama, draft, draft_length=CostAware(3, costs=Costs(0.1)))
        once, again = (spec.generate(tiny.prompt(9), max_new_tokens=40, do_sample=True, seed=3) for _ in range(2))
        assert torch.equal(once.sequences, again.sequences)
        assert once.stats.accepted > 0


def test_rows_that_must_be_what_they_are_alone_draft_along_the_first_path(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, ChosenExit(1, 3), draft_length=2)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "eos_token_id": None, "seed": 3}
    together = spec.generate(tiny.prompt(9, 3), **options).sequences
    assert torch.equal(together[:1], spec.generate(tiny.prompt(9, 3)[:1], **options).sequences)


@pytest.mark.parametrize("layers", [0, 3, True, "2"])
def test_numbers_of_layers_that_do_not_fit_are_refused(llama: PreTrainedModel, layers: Any) -> None:
    with pytest.raises(DraftConfigError, match=r"this model has 4, choose 1\.\.2"):
        selfspec.wrap(llama, ChosenSkips(layers))


@pytest.mark.parametrize("exits", [(2, 2), (3, 1), (True, 3), (1, "3")])
def test_exits_that_are_no_range_are_refused(exits: Any) -> None:
    with pytest.raises(DraftConfigError, match="the earlier one first"):
        ChosenExit(*exits)


def test_names() -> None:
    assert selfspec.wrap(tiny.llama(), "clasp:2").draft == ChosenSkips(2)
    assert selfspec.wrap(tiny.llama(), "del:1-3").draft == ChosenExit(1, 3)
    assert [draft.spelling for draft in DRAFTS.values()] == ["clasp:2", "del:1-3"]
    with pytest.raises(DraftConfigError, match=r"exit layer 4 is out of range"):
        selfspec.wrap(tiny.llama(), "del:1-4")
