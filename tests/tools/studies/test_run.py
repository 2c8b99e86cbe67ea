"""A whole study: all that was to be found out is, once, by however many workers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.studies import declared, stories_loader
from selfspec.errors import StudyError
from selfspec.tools.studies import run
from selfspec.tools.studies.judge import estimate
from selfspec.tools.studies.models import StudiedModel
from selfspec.tools.studies.points import Point, Result
from selfspec.tools.studies.report.panels import panels
from selfspec.tools.studies.run import Finding, do, work_on

pytest.importorskip("pandas")

Load = Callable[[str], StudiedModel]


@pytest.fixture(scope="module")
def load() -> Load:
    return stories_loader()


@pytest.fixture(scope="module")
def alone(load: Load, tmp_path_factory: pytest.TempPathFactory) -> Finding:
    """What one worker finds."""
    return work_on(declared(), load, tmp_path_factory.mktemp("alone"))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each point was really done."""
    counted: Counter[str] = Counter()

    def counting(points: Sequence[Point], *rest: Any) -> list[Result]:
        results = do(points, *rest)
        counted.update(point.key for point in points)
        return results

    monkeypatch.setattr(run, "do", counting)
    return counted


def test_a_study_is_done_once_and_grows(alone: Finding, load: Load, tmp_path: Path, done: Counter[str]) -> None:
    first = work_on(declared(), load, tmp_path)
    assert first.table == alone.table
    assert not first.failed
    # Exits and sublayers, at two temperatures and two lengths.
    assert len(first.table) == (4 + 10) * 2 * 2
    assert set(done.values()) == {1}
    count = done.total()
    assert work_on(declared(), load, tmp_path).table == first.table
    assert done.total() == count
    # A longer study takes over what a shorter one found out.
    work_on(declared(drafts=["exits", "sublayers", "layers"]), load, tmp_path)
    assert done.total() == count + 5 * 2


def test_trees_are_confirmed_beside_chains(load: Load, tmp_path: Path) -> None:
    asked = declared(drafts=["exit:4"], temperatures=[0.0], draft_lengths=[1, 3], nodes=[2, 5], confirm=1)
    found = work_on(asked, load, tmp_path)
    assert not found.failed
    shapes = [row for panel in panels(found) for row in panel.shapes]
    trees = {(row["draft_length"], row["nodes"]) for row in shapes if row["nodes"] is not None}
    assert trees == {(1, 2), (1, 5), (3, 5)}
    assert len(shapes) == len(trees) + 1
    assert all(row["exact"] for row in shapes)
    wide, chain = (next(row for row in shapes if row["nodes"] == nodes) for nodes in (5, None))
    assert wide["measured_judged_by_position"] != chain["measured_judged_by_position"]


@pytest.mark.tools
def test_four_workers_of_which_one_is_interrupted_find_what_one_does(
    alone: Finding, load: Load, tmp_path: Path, done: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = run.do
    stopped: list[int] = []

    def mortal(points: Sequence[Point], *rest: Any) -> list[Result]:
        if points[0].kind == "estimate" and not stopped:
            stopped.append(threading.get_ident())
            raise SystemExit
        return counting(points, *rest)

    monkeypatch.setattr(run, "do", mortal)
    found: list[Finding] = []

    def join_in() -> None:
        # Processes would not share what runs single layers of the model.
        own = replace(load("stories"))
        with suppress(SystemExit):
            found.append(work_on(declared(), lambda name: own, tmp_path))

    workers = [threading.Thread(target=join_in) for _ in range(4)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert len(stopped) == 1
    assert [each.table for each in found] == [alone.table] * 3
    assert set(done.values()) == {1}
    assert done.keys() == alone.results.keys()


def test_what_goes_wrong_with_a_point_is_its_result(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(studied: StudiedModel, texts: Any, points: Sequence[Point]) -> list[dict[str, Any]]:
        if any(point.content["draft"] == "exit:3" for point in points):
            raise ZeroDivisionError("of all things")
        return estimate(studied, texts, points)

    monkeypatch.setattr(run, "estimate", fails)
    finding = work_on(declared(drafts=["exits"], temperatures=[0.0]), load, tmp_path)
    (failed,) = finding.failed
    assert failed.point.content["draft"] == "exit:3"
    assert failed.error is not None
    assert failed.error.startswith("ZeroDivisionError: of all things (test_run.py:")
    assert {row["draft"] for row in finding.table if row.get("error") is None} == {"exit:1", "exit:2", "exit:4"}


def test_an_interrupt_keeps_what_was_finished(load: Load, tmp_path: Path, done: Counter[str]) -> None:
    def interrupt(count: int, known: int) -> None:
        if count >= 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work_on(declared(), load, tmp_path, interrupt)
    assert done.total() >= 10
    work_on(declared(), load, tmp_path)
    assert set(done.values()) == {1}


def test_one_model_is_not_named_twice(load: Load, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="same weights"):
        work_on(declared(models=["a", "b"], drafts="exit:1", temperatures=0.0), load, tmp_path)
