"""Medians and their intervals."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from selfspec.measure.interval import LEVEL, estimate


def test_five_repeats_take_their_range() -> None:
    found = estimate([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (found.median, found.low, found.high, found.confidence) == (3.0, 1.0, 5.0, 0.9375)
    assert found.shown(1) == "3.0 (1.0-5.0)"


def test_one_repeat_says_that_it_knows_nothing() -> None:
    found = estimate([2.0])
    assert (found.median, found.low, found.high, found.confidence) == (2.0, 2.0, 2.0, 0.0)


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=60))
def test_intervals_are_as_narrow_as_their_confidence_allows(values: list[float]) -> None:
    found = estimate(values)
    number, ordered = len(values), sorted(values)
    assert found.low <= found.median <= found.high
    # Between the k-th smallest and the k-th largest: missed if fewer than k values lie on one side of the median.
    ranks = [k for k in range(1, number // 2 + 1) if 1 - 2 * binom.cdf(k - 1, number, 0.5) >= LEVEL]
    rank = max(ranks, default=1)
    assert (found.low, found.high) == (ordered[rank - 1], ordered[number - rank])
    assert found.confidence == pytest.approx(1 - 2 * binom.cdf(rank - 1, number, 0.5), abs=1e-9)


def test_intervals_hold_the_true_median_as_often_as_they_say() -> None:
    drawn = random.Random(0)
    found = [estimate([drawn.expovariate(1.0) for _ in range(9)]) for _ in range(2000)]
    held = sum(each.low <= 0.6931 <= each.high for each in found) / len(found)
    assert held == pytest.approx(found[0].confidence, abs=0.02)
    assert found[0].confidence >= LEVEL
