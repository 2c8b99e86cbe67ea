"""Medians, ratios and shares with their intervals: textbook values, and how often they hold what they should."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from helpers import joints
from selfspec.measure.estimate import LEVEL, Estimate, holm_rejects


def test_five_samples_take_their_range() -> None:
    found = Estimate.of_median([3.0, 1.0, 2.0, 5.0, 4.0])
    assert found == Estimate(3.0, 1.0, 5.0, 0.9375)
    assert found.shown(1) == "3.0 (1.0-5.0)"


def test_one_sample_says_that_it_knows_nothing() -> None:
    assert Estimate.of_median([2.0]) == Estimate.of_ratio([4.0], [2.0]) == Estimate(2.0, 2.0, 2.0, 0.0)


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        Estimate.of_median([])
    with pytest.raises(ValueError, match="in pairs"):
        Estimate.of_ratio([], [])
    with pytest.raises(ValueError, match="in pairs"):
        Estimate.of_ratio([1.0], [1.0, 2.0])
    assert Estimate.of_share(0, 0) is None


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=60))
def test_intervals_of_medians_are_as_narrow_as_their_confidence_allows(values: list[float]) -> None:
    found = Estimate.of_median(values)
    number, ordered = len(values), sorted(values)
    assert found.low <= found.value <= found.high
    # Between the k-th smallest and the k-th largest: missed if fewer than k values lie on one side of the median.
    ranks = [k for k in range(1, number // 2 + 1) if 1 - 2 * binom.cdf(k - 1, number, 0.5) >= LEVEL]
    rank = max(ranks, default=1)
    assert (found.low, found.high) == (ordered[rank - 1], ordered[number - rank])
    assert found.confidence == pytest.approx(1 - 2 * binom.cdf(rank - 1, number, 0.5), abs=1e-9)


def test_a_ratio_over_texts_covers_the_truth() -> None:
    draws = random.Random(0)
    held = 0
    for _ in range(1000):
        wholes = [draws.uniform(5, 15) for _ in range(30)]
        found = Estimate.of_ratio([2 * whole + draws.gauss(0, 2) for whole in wholes], wholes)
        held += found.low <= 2 <= found.high
    assert 0.92 < held / 1000 < 0.97


def test_more_samples_narrow_a_ratio() -> None:
    few = Estimate.of_ratio([1.0, 3.0], [4, 4])
    many = Estimate.of_ratio([1.0, 3.0] * 50, [4, 4] * 50)
    assert (few.value, few.low, few.high) == (0.5, 0.25, 0.75)
    assert many.value == 0.5
    assert few.low < many.low < 0.5 < many.high < few.high


def test_wilson_is_the_textbooks() -> None:
    found, none, all_of = (Estimate.of_share(*counts) for counts in ((8, 10), (0, 20), (20, 20)))
    assert found is not None
    assert none is not None
    assert all_of is not None
    # Newcombe (1998), table I for other numbers, by the formula.
    assert [found.low, found.high] == pytest.approx([0.4902, 0.9433], abs=1e-4)
    assert (none.low, all_of.high) == (0.0, 1.0)
    assert none.high == pytest.approx(1 - all_of.low)


@pytest.mark.tools
def test_two_shares_of_one_truth_agree_as_often_as_they_should() -> None:
    draws = random.Random(0)
    agreed = 0
    for _ in range(2000):
        one, other = (Estimate.of_share(sum(draws.random() < 0.7 for _ in range(120)), 120) for _ in range(2))
        assert one is not None
        assert other is not None
        agreed += one.agrees_with(other)
    assert 0.935 < agreed / 2000 < 0.97
    assert not Estimate(0.5, 0.4, 0.6).agrees_with(Estimate(0.8, 0.75, 0.85))


@pytest.mark.parametrize(
    "p_values", [[0.5, 0.004, 0.0001, 0.02], [0.004, 0.004, 0.004], [1e-9] * 3, [0.3], [], [0.002, 0.9, 0.006, 0.004]]
)
def test_holm(p_values: list[float]) -> None:
    named = {str(index): value for index, value in enumerate(p_values)}
    rejected = {int(name) for name in joints.holm_rejects(named, 0.01)}
    assert holm_rejects(p_values, 0.01) == [index in rejected for index in range(len(p_values))]
