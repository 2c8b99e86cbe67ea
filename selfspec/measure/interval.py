"""The median of few measurements, with an interval that assumes nothing of how they are distributed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

LEVEL = 0.9
"""The least confidence of an interval, where there are enough measurements for it."""


@dataclass(frozen=True)
class Estimate:
    """A median and its interval.

    Attributes:
        median: of the measurements.
        low: lower end of the interval.
        high: upper end.
        confidence: the chance that such an interval holds the true median. Of fewer than five measurements the
            interval is their range, and its confidence under `LEVEL`.
    """

    median: float
    low: float
    high: float
    confidence: float

    def shown(self, digits: int) -> str:
        """As tables show it: `1.23 (1.10-1.31)`."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"

    def to_dict(self) -> dict[str, float]:
        """Ready for JSON."""
        return asdict(self)


def estimate(values: Sequence[float]) -> Estimate:
    """The median, and the narrowest interval between order statistics that holds it with confidence `LEVEL`.

    The interval between the k-th smallest and the k-th largest of n values misses the median with probability
    2 P(B < k), where B is binomial with n trials of 1/2.

    Args:
        values: at least one.
    """
    ordered = sorted(values)
    number = len(ordered)
    rank, confidence = 1, _confidence(number, 1)
    while 2 * (rank + 1) <= number + 1 and _confidence(number, rank + 1) >= LEVEL:
        rank += 1
        confidence = _confidence(number, rank)
    return Estimate(statistics.median(ordered), ordered[rank - 1], ordered[number - rank], confidence)


def _confidence(number: int, rank: int) -> float:
    outside = 2 * sum(math.comb(number, below) for below in range(rank))
    return 1.0 - float(outside / 2**number)
