"""The speed-up that costs and an acceptance rate predict."""

from __future__ import annotations

import pytest

from selfspec.control.costs import Costs, forecast, speedup


def test_speedup_is_the_formula() -> None:
    alpha, gamma, costs = 0.7, 3, Costs(draft=0.3, verify=1.2, overhead=0.1)
    expected = (1 - alpha**4) / ((1 - alpha) * (3 * 0.3 + 1.2 + 0.1))
    assert speedup(alpha, gamma, costs) == pytest.approx(expected)
    assert speedup(1.0, gamma, costs) == pytest.approx(4 / 2.2)


def test_the_forecast_is_the_best_length() -> None:
    costs = Costs(draft=0.25)
    best = forecast(0.8, costs)
    assert best.speedup == max(speedup(0.8, length, costs) for length in range(1, 9))
    assert best.speedup == speedup(0.8, best.draft_length, costs)
