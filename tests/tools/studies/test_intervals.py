"""Intervals: textbook values, and how often they hold what they should."""

from __future__ import annotations

import random

import pytest

from selfspec.tools.studies.intervals import Interval, ratio, wilson


def test_wilson_is_the_textbooks() -> None:
    found = wilson(8, 10)
    assert found is not None
    # Of Newcombe (1998), table I for other numbers, by the formula.
    assert [found.low, found.high] == pytest.approx([0.4902, 0.9433], abs=1e-4)
    assert wilson(0, 0) is None
    none, all_of = wilson(0, 20), wilson(20, 20)
    assert none is not None
    assert all_of is not None
    assert (none.low, all_of.high) == (0.0, 1.0)
    assert none.high == pytest.approx(1 - all_of.low)


def test_two_shares_of_one_truth_meet_as_often_as_they_should() -> None:
    draws = random.Random(0)
    met = 0
    for _ in range(2000):
        one, other = (wilson(sum(draws.random() < 0.7 for _ in range(120)), 120) for _ in range(2))
        assert one is not None
        assert other is not None
        met += one.meets(other)
    assert 0.935 < met / 2000 < 0.97
    assert not Interval(0.5, 0.4, 0.6).meets(Interval(0.8, 0.75, 0.85))


def test_a_ratio_over_texts_covers_the_truth() -> None:
    draws = random.Random(0)
    held = 0
    for _ in range(1000):
        wholes = [draws.uniform(5, 15) for _ in range(30)]
        found = ratio([2 * whole + draws.gauss(0, 2) for whole in wholes], wholes)
        held += found.low <= 2 <= found.high
    assert 0.92 < held / 1000 < 0.97
    assert ratio([3.0], [2.0]) == Interval(1.5, 1.5, 1.5)
