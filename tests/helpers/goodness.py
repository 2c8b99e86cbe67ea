"""Goodness of fit against an enumerated joint distribution: Pearson's chi-square with small cells pooled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from scipy.stats import chi2

_SMALLEST_EXPECTED = 5.0


def p_value(observed: Iterable[tuple[int, ...]], joint: Mapping[tuple[int, ...], float]) -> float:
    """Probability of a fit this bad or worse if `observed` are draws from `joint`; 0 if one of them is impossible."""
    counts = Counter(observed)
    if any(joint.get(outcome, 0.0) == 0.0 for outcome in counts):
        return 0.0
    total = counts.total()
    cells: list[tuple[float, float]] = []
    pooled_observed, pooled_expected = 0.0, 0.0
    for outcome, probability in sorted(joint.items(), key=lambda item: item[1]):
        expected = total * probability
        if expected == 0:
            continue
        if expected < _SMALLEST_EXPECTED or 0 < pooled_expected < _SMALLEST_EXPECTED:
            pooled_observed += counts[outcome]
            pooled_expected += expected
        else:
            cells.append((counts[outcome], expected))
    if pooled_expected:
        cells.append((pooled_observed, pooled_expected))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


def holm_rejects(p_values: Mapping[str, float], level: float) -> list[str]:
    """Names whose hypothesis Holm's step-down procedure rejects at a family-wise `level`."""
    rejected = []
    for rank, (name, value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if value > level / (len(p_values) - rank):
            break
        rejected.append(name)
    return rejected
