"""Drafting by load: the faster kind of round runs, and the slower one is tried again now and then."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import selfspec
from helpers.drafting import outcome
from selfspec.control import Controller
from selfspec.control.costs import Costs
from selfspec.draft.draft import Budget, Draft
from selfspec.serve.by_load import ControllerByLoad, LoadGate


def run(gate: LoadGate, rows: int, rounds: int, seconds: Callable[[bool], float]) -> list[bool]:
    """Which of some rounds drafted."""
    drafted = []
    for _ in range(rounds):
        drafts = gate.opens(rows)
        gate.count(rows, drafts, rows * (3 if drafts else 1), seconds(drafts))
        drafted.append(drafts)
    return drafted


@pytest.mark.parametrize(("of_draft", "pays"), [(2.0, True), (2.7, False), (4.0, False)])
@pytest.mark.parametrize("rows", [2, 7, 64])
def test_the_faster_kind_of_round_runs(of_draft: float, pays: bool, rows: int) -> None:
    # Passes of drafts come in many kinds, whose recording is not in the usual round: a small gain is none.
    drafted = run(LoadGate(), rows, 3000, lambda drafts: of_draft if drafts else 1.0)
    later = drafted[200:]
    assert sum(later) / len(later) == pytest.approx(float(pays), abs=0.02)
    # The other kind is still looked at.
    assert len(set(later)) == 2


def test_times_that_scatter_decide_by_what_is_usual() -> None:
    rng = random.Random(0)

    def seconds(drafts: bool) -> float:
        usual = (3.6 if drafts else 1.0) * rng.uniform(0.8, 1.2)
        return 100 * usual if rng.random() < 0.03 else usual

    drafted = run(LoadGate(), 16, 3000, seconds)
    assert sum(drafted[200:]) / 2800 < 0.1


def test_it_notices_a_change() -> None:
    gate = LoadGate()
    run(gate, 8, 1000, lambda drafts: 4.0 if drafts else 1.0)
    assert sum(run(gate, 8, 3000, lambda drafts: 2.0 if drafts else 1.0)[-500:]) > 450


def test_loads_are_judged_apart() -> None:
    gate = LoadGate()
    for _ in range(40):
        run(gate, 4, 10, lambda drafts: 2.0 if drafts else 1.0)
        run(gate, 32, 10, lambda drafts: 8.0 if drafts else 1.0)
    assert sum(run(gate, 3, 50, lambda drafts: 2.0 if drafts else 1.0)) > 45
    assert sum(run(gate, 17, 50, lambda drafts: 8.0 if drafts else 1.0)) < 5


def test_a_larger_load_begins_without_drafts_where_a_smaller_one_runs_without() -> None:
    gate = LoadGate()
    run(gate, 4, 100, lambda drafts: 6.0 if drafts else 1.0)
    assert not any(run(gate, 60, 300, lambda drafts: 6.0 if drafts else 1.0))
    # A smaller one is no larger one's business.
    assert any(run(gate, 2, 16, lambda drafts: 2.0 if drafts else 1.0))


def test_a_trial_that_is_clear_is_short_and_its_gains_are_looked_at_again() -> None:
    gate = LoadGate()
    run(gate, 16, 100, lambda drafts: 6.0 if drafts else 1.0)
    lucky = iter([0.1] * 4)
    assert sum(run(gate, 16, 1200, lambda drafts: next(lucky, 6.0) if drafts else 1.0)) <= 12
    assert sum(run(gate, 16, 4000, lambda drafts: 6.0 if drafts else 1.0)) <= 8


def test_plain_rounds_come_first_and_often_enough_to_be_recorded() -> None:
    drafted = run(LoadGate(), 16, 96, lambda drafts: 2.0 if drafts else 1.0)
    assert not any(drafted[:12])
    assert drafted.count(False) >= 64


def test_rows_that_come_and_go_within_a_load_say_nothing_of_drafts() -> None:
    """A round of more rows takes longer, and is not compared with what the other kind took for fewer."""
    gate = LoadGate()
    drafted = []
    for number in range(3000):
        rows = 33 + number // 150 % 2 * 31
        drafts = gate.opens(rows)
        gate.count(rows, drafts, rows * (3 if drafts else 1), rows * (3.5 if drafts else 1.0))
        drafted.append(drafts)
    assert sum(drafted[64:]) < 20


def test_a_single_row_is_left_to_the_control() -> None:
    gate = LoadGate()
    assert all(run(gate, 1, 300, lambda drafts: 9.0 if drafts else 1.0))


def test_a_controller_by_load_drafts_within_its_rows_and_never_in_lockstep(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, learned = Controller(Budget.chain(5)), []
    monkeypatch.setattr(inner, "learn", lambda draft, rows: learned.append(rows))
    monkeypatch.setattr(inner, "keeps_lockstep", lambda: True)
    controller = ControllerByLoad(inner, None, most_rows=4)
    draft = Draft.chain(torch.zeros(1, 0, dtype=torch.long))
    assert controller.budget(9, [True] * 4) == Budget.chain(5)
    controller.learn(draft, [outcome(0, 0, 1)])
    assert controller.budget(9, [True] * 5) == Budget.chain(0)
    controller.learn(draft, [outcome(0, 0, 1)])
    assert len(learned) == 1
    assert not controller.keeps_lockstep()


def test_rows_that_come_and_go_are_judged_by_what_they_gain_on_average() -> None:
    costs = Costs(draft=0.1, widening=0.01)
    controller = selfspec.CostAware().begin_by_load(costs)
    together = selfspec.CostAware().begin(costs)
    assert not ControllerByLoad(controller).keeps_lockstep()

    draft = Draft.chain(torch.zeros(4, 3, dtype=torch.long), steps=3)
    # Three rows accept all, and the fourth nothing: in one generation it ends the batch.
    outcomes = [outcome(3, 3, 4)] * 3 + [outcome(1, 0, 1)]
    for each in (controller, together):
        for _ in range(40):
            each.budget(50, [True] * 4)
            each.learn(draft, outcomes)
    assert controller._model.rate > 1.5 > together._model.rate  # type: ignore[attr-defined]
