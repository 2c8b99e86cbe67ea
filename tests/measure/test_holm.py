"""Holm's procedure against the one that tests use."""

from __future__ import annotations

import pytest

from helpers import goodness
from selfspec.measure.estimate import holm_rejects


@pytest.mark.parametrize(
    "p_values", [[0.5, 0.004, 0.0001, 0.02], [0.004, 0.004, 0.004], [1e-9] * 3, [0.3], [], [0.002, 0.9, 0.006, 0.004]]
)
def test_holm(p_values: list[float]) -> None:
    named = {str(index): value for index, value in enumerate(p_values)}
    rejected = {int(name) for name in goodness.holm_rejects(named, 0.01)}
    assert holm_rejects(p_values, 0.01) == [index in rejected for index in range(len(p_values))]
