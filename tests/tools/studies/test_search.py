"""Searches for skip sets: what they find, what they cost, and going on with them."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path as FilePath

import pytest

from helpers.studies import declared, stories_loader
from selfspec.tools.studies.models import StudiedModel

pytest.importorskip("sqlalchemy")

from selfspec.tools.studies.board import Board
from selfspec.tools.studies.run import work_on
from selfspec.tools.studies.search import Evaluator, Found, find, search
from selfspec.tools.studies.skip_sets import Space

STUDY = declared(drafts="sublayers", temperatures=1.0, draft_lengths=[1, 2, 4], max_new_tokens=34, reach=1)


@pytest.fixture(scope="module")
def studied() -> StudiedModel:
    return stories_loader()("")


def _space(studied: StudiedModel, fewest: int, most: int) -> Space:
    return Space.of(studied.model, studied.adapter, fewest, most)


def _methods(found: Found) -> list[str]:
    return [row["method"] for row in found.scores]


def test_in_two_thirds_of_the_evaluations_it_finds_the_best_pair(studied: StudiedModel, tmp_path: FilePath) -> None:
    space = _space(studied, 2, 2)
    with Board(tmp_path) as board:
        everything = Evaluator(studied, STUDY, space, board)
        everything.evaluate(list(map(frozenset, combinations(space.choices, 2))))
    assert len(everything.scores) == 45
    found = find(studied, STUDY, space, evaluations=30)
    best = max(everything.scores.values(), key=lambda row: row["predicted_speedup"])
    assert found.best == {**best, "method": found.best["method"]}
    assert len(found.scores) == 30


def test_the_front_holds_what_nothing_beats(studied: StudiedModel) -> None:
    found = find(studied, STUDY, _space(studied, 1, 5), evaluations=40)
    assert len(set(_methods(found))) >= 3
    for row in found.front:
        assert not any(
            other["alpha"] >= row["alpha"] and other["c"] <= row["c"] and other != row for other in found.scores
        )
    assert found.best["predicted_speedup"] == max(row["predicted_speedup"] for row in found.scores)


def test_a_seed_gives_the_same_search_again(studied: StudiedModel) -> None:
    def once() -> Found:
        return find(studied, declared(seeds=3, temperatures=1.0), _space(studied, 1, 4), evaluations=12)

    assert once() == once()


def test_an_interrupted_search_continues_and_repeats_nothing(studied: StudiedModel, tmp_path: FilePath) -> None:
    space = _space(studied, 1, 4)

    def interrupt(evaluations: int) -> None:
        if evaluations >= 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find(studied, STUDY, space, 24, tmp_path, interrupt)
    seen: list[int] = []
    found = find(studied, STUDY, space, 24, tmp_path, seen.append)
    with Board(tmp_path) as board:
        # Beside the sets their texts and their costs.
        assert len(board.results()) == 24 + 2
    assert len(found.scores) == 24
    assert min(seen) >= 16
    assert _methods(found).count("before") >= 16


def test_two_searches_share_the_work(studied: StudiedModel, tmp_path: FilePath) -> None:
    space = _space(studied, 1, 4)
    with Board(tmp_path) as one, Board(tmp_path) as other:
        mine, theirs = (Evaluator(studied, STUDY, space, board) for board in (one, other))
        first = frozenset({space.choices[0]})
        with other.claimed([theirs._point(first)]):
            # Sets that another worker is at work on are left to it.
            assert mine.evaluate([first]) == []
        search(mine, 16)
        found = search(theirs, 16)
    assert _methods(found) == ["before"] * 16


def test_a_search_takes_over_what_a_study_found_and_leaves_other_sets_alone(
    studied: StudiedModel, tmp_path: FilePath
) -> None:
    work_on(STUDY, lambda name: studied, tmp_path)
    singles = find(studied, STUDY, _space(studied, 1, 1), 10, tmp_path)
    assert _methods(singles) == ["before"] * 10
    pairs = find(studied, STUDY, _space(studied, 2, 2), 4, tmp_path)
    assert [row["skipped"] for row in pairs.scores] == [2] * 4


def test_a_space_that_is_exhausted_ends_the_search(studied: StudiedModel) -> None:
    assert len(find(studied, STUDY, _space(studied, 1, 1), evaluations=40).scores) == 10
