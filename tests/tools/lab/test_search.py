"""Searches for skip sets, what sublayers and drafts cost, and studies that are confirmed."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import tiny
from helpers.studies import Notes, declared, known, stories_loader
from selfspec.draft import EarlyExit, LayerSkip
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import DraftConfigError, StudyError
from selfspec.measure.costs import MeasuredCosts
from selfspec.measure.estimate import Estimate
from selfspec.measure.teacher_forced import LayerViews, TeacherForcedText, parts_run
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.registry import find_adapter
from selfspec.tools.lab import ablation
from selfspec.tools.lab.ablation import Finding, work_on
from selfspec.tools.lab.drafts import Space, draft_kind, skip_name, skip_set
from selfspec.tools.lab.prices import Prices, costs_run, prices_by_measurement, prices_by_weights, timed_paths
from selfspec.tools.lab.runs import Runs
from selfspec.tools.lab.search import SearchBy, scored, search, sets_by_similarity
from selfspec.tools.lab.study import StudiedModel
from selfspec.tools.lab.table import estimate_in, records

NATIVE = "native"
pytest.importorskip("pandas")

STUDY = declared(drafts="sublayers", temperatures=1.0, draft_lengths=[1, 2, 4], max_new_tokens=34, reach=1)


@pytest.fixture(scope="module")
def studied() -> StudiedModel:
    return stories_loader()("")


def _space(studied: StudiedModel, fewest: int, most: int) -> Space:
    return Space.of(studied.model, studied.adapter, fewest, most)


@pytest.mark.tools
def test_in_a_third_of_the_evaluations_it_finds_the_best_pair(studied: StudiedModel) -> None:
    space = _space(studied, 2, 2)
    every = [skip_name(each) for each in combinations(space.choices, 2)]
    everything = scored(work_on(replace(STUDY, drafts=tuple(every)), lambda name: studied, Runs(None)))
    assert len(everything) == 45
    found = scored(search(studied, STUDY, space, evaluations=15))
    best = [max(each, key=lambda row: row["predicted_speedup"]) for each in (found, everything)]
    assert best[0]["draft"] == best[1]["draft"]
    assert len(found) == len({row["draft"] for row in found}) == 15


@pytest.mark.tools
def test_sets_have_sizes_that_were_asked_for(studied: StudiedModel) -> None:
    found = scored(search(studied, STUDY, _space(studied, 1, 5), evaluations=40))
    assert all(1 <= row["skipped"] <= 5 for row in found)


@pytest.mark.tools
def test_a_greedy_search_keeps_what_it_left_out(studied: StudiedModel) -> None:
    found = scored(search(studied, STUDY, _space(studied, 1, 3), evaluations=10 + 9 + 4, by="greedy"))
    assert [row["evaluation"] for row in found] == [*range(1, 24)]
    sizes = [[row for row in found if row["skipped"] == size] for size in (1, 2, 3)]
    assert [len(some) for some in sizes] == [10, 9, 4]
    for shorter, longer in pairwise(sizes):
        best = max(shorter, key=lambda row: row["predicted_speedup"])["draft"]
        assert all(skip_set(best) < skip_set(row["draft"]) for row in longer)


@pytest.mark.tools
def test_a_bayesian_search_says_how_it_went_and_goes_the_same_way_again(studied: StudiedModel, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    space, runs = _space(studied, 1, 3), Runs(tmp_path)
    found = scored(search(studied, STUDY, space, 12, runs, by="bayes"))
    assert {row["skipped"] for row in found} <= {1, 2, 3}
    assert [row["evaluation"] for row in found] == [*range(1, 13)]
    speeds = [row["predicted_speedup"] for row in found]
    assert [row["best_so_far"] for row in found] == pytest.approx([*accumulate(speeds, max)])
    judged, watch = len(runs.measured("teacher forcing")), Notes()
    assert scored(search(studied, STUDY, space, 12, runs, watch, by="bayes")) == found
    assert watch.steps == ["what is known"] * watch.expected
    assert len(runs.measured("teacher forcing")) == judged


def test_layers_are_left_out_whole(studied: StudiedModel) -> None:
    space = _space(studied, 2, 4).of_layers
    assert [len(unit) for unit in space.units] == [2] * 5
    ways: list[SearchBy] = ["similarity", "greedy"]
    for by in ways:
        found = scored(search(studied, STUDY, space, 6, by=by))
        assert found
        assert all(space.has(skip_set(row["draft"])) for row in found)
    with pytest.raises(StudyError, match="3 to 3 sublayers"):
        search(studied, STUDY, replace(space, fewest=3, most=3), 6)


def test_a_search_takes_over_what_a_study_found_and_leaves_other_sets_alone(
    studied: StudiedModel, tmp_path: Path
) -> None:
    runs = Runs(tmp_path)
    work_on(STUDY, lambda name: studied, runs)
    before = len(runs.measured("teacher forcing"))
    # There are no more sets of one sublayer.
    assert len(scored(search(studied, STUDY, _space(studied, 1, 1), 40, runs))) == 10
    assert len(runs.measured("teacher forcing")) == before
    watch = Notes()
    pairs = scored(search(studied, STUDY, _space(studied, 2, 2), 4, runs, watch))
    assert [row["skipped"] for row in pairs] == [2] * 4
    # What was known is no part of what is left.
    assert watch.expected == len(watch.steps)


def test_a_set_that_cannot_be_judged_is_said(studied: StudiedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> list[list[dict[str, Any]]]:
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
    assert Prices.of({"prices": json.loads(json.dumps(asdict(prices)))}) == prices


def test_a_study_of_exits_and_a_search_ask_for_the_same_costs() -> None:
    studied = stories_loader()("")
    exits = costs_run(studied, ("exit:1", "exit:2"), "measured", NATIVE)
    assert exits.key == costs_run(studied, ["skip:attn=1;mlp=2"], "measured", NATIVE).key
    assert exits.key == costs_run(studied, [], "measured", NATIVE).key
    # Exits and skip sets alike: with them alone one sublayer would cost what is left over.
    assert {draft_kind(name) for name in timed_paths(studied.depth)} == {"exit", "skip"}


def test_intervals_of_what_was_timed_are_those_of_c() -> None:
    drafters: dict[str, LayerPathDrafter] = {"exit:2": EarlyExit(2), "m": LayerSkip(mlp=[0, 3])}
    measured = _measured({"exit:2": Estimate(0.55, 0.5, 0.6), "m": Estimate(0.75, 0.7, 0.8)})
    model = tiny.llama()
    prices = prices_by_measurement(measured, drafters, _DEPTH)
    found = prices.of_draft(EarlyExit(2), model, find_adapter(model)).c
    assert found.value == pytest.approx(0.55)
    assert (found.low, found.high) == pytest.approx((0.5, 0.6))


@pytest.fixture(scope="module")
def finding() -> Finding:
    """A study with one draft confirmed on each text, greedily and sampled."""
    return work_on(declared(drafts=["exits", "sublayers", "layers"], confirm=1), stories_loader(), Runs(None))


@pytest.mark.tools
def test_confirmed_drafts_agree_with_their_estimates(finding: Finding) -> None:
    rows = records(finding.table)
    confirmed = [row for row in rows if "speedup" in row]
    assert {row["temperature"] for row in confirmed} == {0.0, 1.0}
    for row in confirmed:
        same = ("draft", "draft_length", "temperature")
        (estimated,) = [
            each for each in rows if "speedup" not in each and all(each[name] == row[name] for name in same)
        ]
        own, other = estimate_in(estimated, "acceptance_rate"), estimate_in(row, "acceptance_rate")
        assert own is not None
        assert other is not None
        assert max(own.low, other.low) <= min(own.high, other.high)
        if row["temperature"] == 0:
            # Greedily the estimate is the generation itself.
            assert row["equal"] == 1
            assert own.value == pytest.approx(other.value)
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert row["cache_bytes"] > 0
        assert row["n"] == 3


def test_a_study_names_what_its_lines_show(finding: Finding) -> None:
    table = finding.table[finding.table["measured"] == "teacher forcing"]
    greedy = table[(table["temperature"] == 0) & (table["draft_length"] == 1)]
    assert greedy.groupby("part")["layer"].nunique().to_dict() == {"MLP": 5, "attention": 5, "layer": 5}
    assert sorted(greedy["exit"].dropna()) == [1, 2, 3, 4]
    assert set(table["kind"]) == {"exit", "skip"}


def test_drafts_from_a_reduced_vocabulary_have_rows_and_prices_of_their_own(tmp_path: Path) -> None:
    words = tmp_path / "words.json"
    words.write_text(json.dumps({"tokens": list(range(64))}))
    drafts = [f"{path}{end}" for path in ("exit:2", "exit:3", "skip:attn=1") for end in ("", f"+vocab:{words}")]
    finding = work_on(declared(drafts=drafts, temperatures=[0.0]), stories_loader(), Runs(None))
    assert not finding.failed
    c = dict(zip(finding.table["draft"], finding.table["c"], strict=True))
    assert all(c[f"{path}+vocab:{words}"] < c[path] for path in ("exit:2", "exit:3", "skip:attn=1"))
    assert set(finding.table["kind"]) == {"exit", "exit+vocab", "skip", "skip+vocab"}
