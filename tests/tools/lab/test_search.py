"""Searches for skip sets: what they find, what sublayers and drafts cost, and going on with them."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import combinations
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch

from helpers import tiny
from helpers.studies import declared, known, stories_loader
from selfspec.control.costs import Costs
from selfspec.draft import EarlyExit, LayerSkip
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import DraftConfigError, StudyError
from selfspec.measure.costs import MeasuredCosts
from selfspec.measure.estimate import Estimate
from selfspec.measure.teacher_forced import LayerViews, TeacherForcedText, parts_run
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.registry import find_adapter
from selfspec.tools.lab import ablation
from selfspec.tools.lab.ablation import work_on
from selfspec.tools.lab.drafts import Space, draft_kind
from selfspec.tools.lab.runs import Asked, Run, Runs
from selfspec.tools.lab.search import evaluate, search, sets_by_similarity, speed
from selfspec.tools.lab.study import StudiedModel
from selfspec.tools.lab.table import (
    Prices,
    SublayerPrices,
    best_length,
    costs_asked,
    find_costs,
    pareto_front,
    prices_by_measurement,
    prices_by_weights,
    speedups,
    timed_paths,
)

pytest.importorskip("pandas")

STUDY = declared(drafts="sublayers", temperatures=1.0, draft_lengths=[1, 2, 4], max_new_tokens=34, reach=1)


@pytest.fixture(scope="module")
def studied() -> StudiedModel:
    return stories_loader()("")


def _space(studied: StudiedModel, fewest: int, most: int) -> Space:
    return Space.of(studied.model, studied.adapter, fewest, most)


@pytest.mark.tools
def test_in_a_third_of_the_evaluations_it_finds_the_best_pair(studied: StudiedModel, tmp_path: FilePath) -> None:
    space = _space(studied, 2, 2)
    everything = evaluate(Runs(tmp_path), STUDY, studied, list(map(frozenset, combinations(space.choices, 2))))
    assert len(everything) == 45
    found = search(studied, STUDY, space, evaluations=15)
    assert max(found, key=speed) == max(everything, key=speed)
    assert len(found) == len({row["draft"] for row in found}) == 15


@pytest.mark.tools
def test_the_front_holds_what_nothing_beats(studied: StudiedModel) -> None:
    found = search(studied, STUDY, _space(studied, 1, 5), evaluations=40)
    assert all(1 <= row["skipped"] <= 5 for row in found)
    front = pareto_front(found)
    assert max(row["alpha"] for row in found) == front[-1]["alpha"]
    for row in front:
        assert not any(other["alpha"] >= row["alpha"] and other["c"] <= row["c"] and other != row for other in found)


@pytest.mark.tools
def test_an_interrupted_search_continues_and_repeats_nothing(studied: StudiedModel, tmp_path: FilePath) -> None:
    space = _space(studied, 1, 4)

    def interrupt(known: int, of: int, share: float) -> None:
        if known >= 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(studied, STUDY, space, 24, Runs(tmp_path), interrupt)
    assert 12 <= len(Runs(tmp_path).of_kind("estimate")) < 24
    found = search(studied, STUDY, space, 24, Runs(tmp_path))
    assert len(found) == 24
    assert len(Runs(tmp_path).of_kind("estimate")) == 24
    assert found == search(studied, STUDY, space, 24)


def test_a_search_takes_over_what_a_study_found_and_leaves_other_sets_alone(
    studied: StudiedModel, tmp_path: FilePath
) -> None:
    runs = Runs(tmp_path)
    work_on(STUDY, lambda name: studied, runs)
    before = len(runs.of_kind("estimate"))
    # There are no more sets of one sublayer.
    assert len(search(studied, STUDY, _space(studied, 1, 1), 40, runs)) == before == len(runs.of_kind("estimate")) == 10
    pairs = search(studied, STUDY, _space(studied, 2, 2), 4, runs)
    assert [row["skipped"] for row in pairs] == [2] * 4


def test_a_set_that_cannot_be_judged_is_said(studied: StudiedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> list[dict[str, Any]]:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(ablation, "estimate", fails)
    with pytest.raises(StudyError, match="of all things"):
        search(studied, STUDY, _space(studied, 1, 1), evaluations=2)


def _text() -> tuple[TeacherForcedText, Space, Prices]:
    model = tiny.llama()
    adapter = find_adapter(model)
    text = TeacherForcedText(LayerViews(model, adapter), tiny.prompt(12, batch=2), 4)
    return text, Space.of(model, adapter, 2, 2), prices_by_weights(model, adapter)


@torch.no_grad()
def test_with_nothing_dropped_it_finds_the_most_similar_sets() -> None:
    text, space, prices = _text()

    def similarity(skipped: frozenset[Sublayer]) -> float:
        states = text.exact(0)
        for layer, parts in enumerate(parts_run(LayerPath.without(tiny.DEPTH, skipped))):
            states = text.run(layer, parts, states)
        return float(
            torch.cosine_similarity(states[:, 3:-1].float(), text.exact(tiny.DEPTH)[:, 3:-1].float(), -1).mean()
        )

    one_by_one = sorted(map(frozenset, combinations(space.choices, 2)), key=lambda each: -similarity(each))
    assert sets_by_similarity(text, space, prices, width=1000) == one_by_one
    found = sets_by_similarity(text, space, prices, width=2)
    assert set(found) < set(one_by_one)
    assert found[0] in one_by_one[:5]


@pytest.mark.parametrize(("fewest", "most"), [(0, 2), (3, 2), (1, 8), (9, None)])
def test_a_space_without_sets_is_refused(fewest: int, most: int | None) -> None:
    model = tiny.llama()
    with pytest.raises(DraftConfigError, match=r"choose from 1\.\.7"):
        Space.of(model, find_adapter(model), fewest, most)


_DEPTH = 4


def _measured(draft: dict[str, Estimate]) -> MeasuredCosts:
    """Passes of two widths, and an overhead, that are the same for all drafts."""
    draft = {**draft, "none": known(0.0)}
    verify = {name: {1: known(1.0), 3: known(1.2)} for name in draft}
    overhead = dict.fromkeys(draft, known(0.05))
    return MeasuredCosts(known(0.01), draft, verify, overhead, context=8, batch=1, lengths=(1,))


def _judged(draft: str, **found: Any) -> Run:
    return Run(Asked("estimate", {"draft": draft}), found)


def test_what_each_sublayer_costs_is_found_from_drafts_that_differ_in_them() -> None:
    fixed, attention, mlp = 0.12, 0.1, 0.12
    drafters: dict[str, LayerPathDrafter] = {
        "exit:2": EarlyExit(2),
        "a": LayerSkip(attention=[1, 2]),
        "m": LayerSkip(mlp=[0, 3]),
    }

    def cost(path: LayerPath) -> float:
        ran = [each.part for each in path_of(path)]
        return fixed + attention * ran.count(Part.ATTENTION) + mlp * ran.count(Part.MLP)

    def path_of(path: LayerPath) -> list[Sublayer]:
        return [Sublayer(layer, part) for layer in range(_DEPTH) for part in Part if path.runs(Sublayer(layer, part))]

    measured = _measured({name: known(cost(each.path(_DEPTH))) for name, each in drafters.items()})
    prices = prices_by_measurement(measured, drafters, _DEPTH)
    assert prices.sublayers.fixed == pytest.approx(fixed)
    assert prices.of_part(Part.ATTENTION) == pytest.approx(attention)
    assert prices.of_part(Part.MLP) == pytest.approx(mlp)
    assert prices.costs(LayerPath.full(_DEPTH)).draft == pytest.approx(1.0)
    assert prices.costs(EarlyExit(2).path(_DEPTH)).draft == pytest.approx(cost(EarlyExit(2).path(_DEPTH)))
    target = prices.target
    assert [target.verify, target.widening, target.overhead] == pytest.approx([1.0, 0.1, 0.05])
    assert prices.step_seconds == 0.01


@pytest.mark.tools
def test_timed_prices_of_a_model_are_in_order() -> None:
    studied = stories_loader()("")
    drafts = ("exit:1", "exit:4", "skip:attn=1", "lookup+int8", "lookup")
    asked = costs_asked(studied, drafts, "measured")
    prices = Prices.of(Run(asked, find_costs(studied, drafts, asked)))
    # What is not put together from sublayers is timed.
    assert list(prices.known) == ["int8"]
    for name in ("exit:1", "exit:4", "skip:attn=1"):
        c = prices.draft(_judged(name))
        assert c.low <= c.value <= c.high
    c = prices.draft(_judged("lookup+int8", path="int8"))
    assert c.low < c.value < c.high
    assert prices.draft(_judged("lookup", path=None, cost=0.0)).value == 0
    assert prices.of_draft(_judged("exit:1")).draft < prices.of_draft(_judged("exit:4")).draft
    assert prices.step_seconds is not None
    assert prices.step_seconds > 0
    assert 0 < prices.costs(LayerPath.full(studied.depth)).draft < 3


def test_prices_add_up_to_a_plain_step() -> None:
    model = tiny.llama()
    prices = prices_by_weights(model, find_adapter(model))
    assert prices.costs(LayerPath.full(tiny.DEPTH)).draft == pytest.approx(1.0)
    nothing_of_two = LayerPath.without(tiny.DEPTH, [Sublayer(2, part) for part in Part])
    expected = 1 - prices.of_part(Part.ATTENTION) - prices.of_part(Part.MLP)
    assert prices.costs(nothing_of_two).draft == pytest.approx(expected)
    costs = prices.costs(nothing_of_two)
    # Two of four layers are exact: only the rest of the target pass grows with the draft.
    exact = 2 * (prices.of_part(Part.ATTENTION) + prices.of_part(Part.MLP))
    assert costs.widening == pytest.approx(prices.target.widening * (1 - exact))
    asked = Asked("costs", {})
    assert Prices.of(Run(asked, {"prices": json.loads(json.dumps(asdict(prices)))})) == prices


def test_what_is_promised_is_tokens_by_cost_of_a_round() -> None:
    lengths = {
        str(length): {"mean_accepted_length": {"value": tokens, "low": tokens - 0.5, "high": tokens + 0.5}}
        for length, tokens in enumerate((1.8, 2.5, 2.6), 1)
    }
    estimated = Run(Asked("estimate", {"draft": "exit:2"}), {"lengths": lengths})
    parts = SublayerPrices(0.0, [0.25] * 4, [0.25] * 4)
    timed, c = {"exit:2": Costs(0.2, 1.0, 0.1, 0.05)}, {"exit:2": known(0.2)}
    prices = Prices(parts, parts, parts, Costs(0.0), known=timed, known_draft=c)
    promised = speedups(estimated, prices)
    assert best_length(promised) == 2
    assert promised[2].value == pytest.approx(2.5 / (0.4 + 1.2 + 0.05))
    assert promised[2].low == pytest.approx(2.0 / (0.4 + 1.2 + 0.05))


def test_a_study_of_exits_and_a_search_ask_for_the_same_costs() -> None:
    studied = stories_loader()("")
    exits = costs_asked(studied, ("exit:1", "exit:2"), "measured")
    assert exits.key == costs_asked(studied, ["skip:attn=1;mlp=2"], "measured").key
    assert exits.key == costs_asked(studied, [], "measured").key
    # Exits and skip sets alike: with them alone one sublayer would cost what is left over.
    assert {draft_kind(name) for name in timed_paths(studied.depth)} == {"exit", "skip"}


def test_intervals_of_what_was_timed_are_those_of_c() -> None:
    drafters: dict[str, LayerPathDrafter] = {"exit:2": EarlyExit(2), "m": LayerSkip(mlp=[0, 3])}
    measured = _measured({"exit:2": Estimate(0.55, 0.5, 0.6), "m": Estimate(0.75, 0.7, 0.8)})
    found = prices_by_measurement(measured, drafters, _DEPTH).draft(_judged("exit:2"))
    assert found.value == pytest.approx(0.55)
    assert (found.low, found.high) == pytest.approx((0.5, 0.6))
