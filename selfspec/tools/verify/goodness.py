"""Goodness of fit: Pearson's chi-square against a distribution known up to rounding, and Holm's procedure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ChiSquare:
    """One test.

    Attributes:
        statistic: Pearson's.
        degrees: of freedom; 0 where there is but one cell and so nothing to test.
        noncentrality: what rounding alone may add to the statistic's mean.
        p_value: probability of a fit this bad or worse.
    """

    statistic: float
    degrees: int
    noncentrality: float
    p_value: float


def chi_square(observed: Sequence[int], expected: Sequence[float], noncentrality: float) -> ChiSquare:
    """Test counts of cells.

    Args:
        observed: counts.
        expected: their expectations, all positive, with the same sum.
        noncentrality: what rounding alone may add to the statistic's mean.
    """
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in zip(observed, expected, strict=True))
    degrees = len(expected) - 1
    p_value = chi_square_tail(statistic, degrees, noncentrality) if degrees else 1.0
    return ChiSquare(statistic, degrees, noncentrality, p_value)


def chi_square_tail(statistic: float, degrees: int, noncentrality: float) -> float:
    """Probability that a noncentral chi-square variable is at least `statistic`.

    It is a mixture of central ones with 2j more degrees of freedom, j being Poisson with mean noncentrality / 2.
    """
    mean = torch.tensor(noncentrality / 2, dtype=torch.double)
    # Beyond ten standard deviations of a Poisson variable nothing is left.
    more = torch.arange(int(mean + 10 * mean.sqrt()) + 50, dtype=torch.double)
    weights = (torch.special.xlogy(more, mean) - mean - torch.lgamma(more + 1)).exp()
    tails = torch.special.gammaincc(degrees / 2 + more, torch.full_like(more, statistic / 2))
    return float((weights * tails).sum().clamp(max=1.0))


def holm_rejects(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses Holm's step-down procedure rejects at a family-wise level."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected
