"""Paths: which sublayers a pass runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.model.layer_path import LayerPath, Part, Sublayer, sublayers

DEPTH = 4
ALL = sublayers(DEPTH)


def test_sublayers_stand_in_the_order_in_which_they_run() -> None:
    assert [(s.layer, s.part) for s in ALL] == [(layer, part) for layer in range(DEPTH) for part in Part]
    assert [*Part] == [Part.ATTENTION, Part.MLP]
    shuffled = ALL[1::2] + ALL[::2]
    assert sorted(shuffled) == ALL


@pytest.mark.parametrize("end", ALL)
def test_a_path_up_to_a_sublayer_runs_those_before_it_and_hands_over_there(end: Sublayer) -> None:
    path = LayerPath.up_to(DEPTH, end)
    assert [s for s in ALL if path.runs(s)] == ALL[: ALL.index(end)]
    # Before the first there is nothing to hand over.
    assert path.resume_point == (None if end == ALL[0] else end)


@given(st.sets(st.sampled_from(ALL)), st.none() | st.sampled_from(ALL))
def test_a_pass_runs_what_is_neither_skipped_nor_before_its_start(
    skipped: set[Sublayer], start: Sublayer | None
) -> None:
    whole = LayerPath.without(DEPTH, skipped)
    path = whole if start is None else whole.resumed_at(start)
    assert whole.start is None
    assert (path == whole) == (start is None)
    assert path.skipped == whole.skipped
    for place, sublayer in enumerate(ALL):
        wanted = sublayer not in skipped and (start is None or place >= ALL.index(start))
        assert path.runs(sublayer) == wanted


@given(st.sets(st.sampled_from(ALL), min_size=1))
def test_a_skip_set_hands_over_at_the_first_it_skips_unless_nothing_comes_before(skipped: set[Sublayer]) -> None:
    path = LayerPath.without(DEPTH, skipped)
    first = next(s for s in ALL if s in skipped)
    assert path.resume_point == (None if first == ALL[0] else first)
    assert all(path.runs(s) for s in ALL[: ALL.index(first)])


@given(st.lists(st.sampled_from(ALL), min_size=1))
def test_the_same_skip_set_is_the_same_path_in_whatever_order_it_is_named(skipped: list[Sublayer]) -> None:
    path, other = LayerPath.without(DEPTH, skipped), LayerPath.without(DEPTH, [*reversed(skipped), *skipped])
    assert path == other
    assert len({path, other}) == 1


def test_an_early_exit_is_the_skip_set_of_all_layers_after_it() -> None:
    exit_path = LayerPath.up_to(DEPTH, Sublayer(2, Part.ATTENTION))
    assert exit_path == LayerPath.without(DEPTH, [s for s in ALL if s.layer >= 2])
