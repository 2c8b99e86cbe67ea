"""The tests of fit: tails against scipy's, Holm's procedure against the one that tests use."""

from __future__ import annotations

import math

import pytest
from scipy.stats import chi2, chisquare, ncx2

from helpers import goodness
from selfspec.tools.verify.fit import chi_square, chi_square_tail, holm_rejects


@pytest.mark.parametrize("degrees", [1, 4, 40])
@pytest.mark.parametrize("statistic", [0.0, 0.5, 9.0, 80.0, 900.0])
def test_central_tail(statistic: float, degrees: int) -> None:
    assert math.isclose(chi_square_tail(statistic, degrees, 0.0), chi2.sf(statistic, degrees), rel_tol=1e-9)


@pytest.mark.parametrize("noncentrality", [1e-9, 0.3, 7.0, 400.0])
@pytest.mark.parametrize(("statistic", "degrees"), [(2.0, 1), (30.0, 12), (500.0, 40)])
def test_noncentral_tail(statistic: float, degrees: int, noncentrality: float) -> None:
    found = chi_square_tail(statistic, degrees, noncentrality)
    assert math.isclose(found, ncx2.sf(statistic, degrees, noncentrality), rel_tol=1e-6, abs_tol=1e-12)


def test_chi_square() -> None:
    wanted = chisquare([18, 30, 52], [25.0, 25.0, 50.0])
    found = chi_square([18, 30, 52], [25.0, 25.0, 50.0])
    assert math.isclose(found, wanted.statistic)
    assert math.isclose(chi_square_tail(found, 2, 0.0), wanted.pvalue)


def test_one_cell_tests_nothing() -> None:
    assert chi_square_tail(chi_square([100], [100.0]), 0, 0.0) == 1.0


@pytest.mark.parametrize(
    "p_values", [[0.5, 0.004, 0.0001, 0.02], [0.004, 0.004, 0.004], [1e-9] * 3, [0.3], [], [0.002, 0.9, 0.006, 0.004]]
)
def test_holm(p_values: list[float]) -> None:
    named = {str(index): value for index, value in enumerate(p_values)}
    rejected = {int(name) for name in goodness.holm_rejects(named, 0.01)}
    assert holm_rejects(p_values, 0.01) == [index in rejected for index in range(len(p_values))]
