"""Searches for skip sets: what they find, what they cost, and going on with them."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch

from helpers import tiny
from helpers.studies import declared, stories_loader
from selfspec.errors import DraftConfigError, StudyError
from selfspec.measure.teacher_forced import LayerViews, TeacherForcedText, parts_run
from selfspec.model.layer_path import LayerPath, Sublayer
from selfspec.model.registry import find_adapter
from selfspec.tools.lab.drafts import Space
from selfspec.tools.lab.search import sets_by_similarity
from selfspec.tools.lab.study import StudiedModel
from selfspec.tools.lab.table import Prices, prices_by_weights

pytest.importorskip("pandas")

from selfspec.tools.lab import ablation
from selfspec.tools.lab.ablation import work_on
from selfspec.tools.lab.runs import Runs
from selfspec.tools.lab.search import evaluate, search, speed
from selfspec.tools.lab.table import pareto_front

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
    known = len(runs.of_kind("estimate"))
    assert len(search(studied, STUDY, _space(studied, 1, 1), 10, runs)) == known == len(runs.of_kind("estimate")) == 10
    pairs = search(studied, STUDY, _space(studied, 2, 2), 4, runs)
    assert [row["skipped"] for row in pairs] == [2] * 4


def test_a_space_that_is_exhausted_ends_the_search(studied: StudiedModel) -> None:
    assert len(search(studied, STUDY, _space(studied, 1, 1), evaluations=40)) == 10


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
