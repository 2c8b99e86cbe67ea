"""An estimated quantity and how sure it is: medians, ratios and shares, each with its interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

LEVEL = 0.9
"""The least confidence of a median's interval, where there are enough samples for it."""

# Standard deviations that 95 % of a normal distribution lie within.
_Z = 1.959964


@dataclass(frozen=True)
class Estimate:
    """A quantity and an interval about it.

    Attributes:
        value: the estimate.
        low: lower end of the interval.
        high: upper end.
        confidence: the chance that such an interval holds the true value; 0 where a single sample says nothing of it.
    """

    value: float
    low: float
    high: float
    confidence: float = 0.0

    @classmethod
    def of_median(cls, samples: Sequence[float]) -> Estimate:
        """Estimate a median, with the narrowest interval between order statistics of confidence `LEVEL` or more.

        It assumes nothing of how samples are distributed: the interval between the k-th smallest and the k-th largest
        of n samples misses the median with probability 2 P(B < k), where B is binomial with n trials of 1/2. Of fewer
        than five samples the interval is their range.

        Raises:
            ValueError: there are no samples.
        """
        if not samples:
            raise ValueError("no samples to take the median of")
        ordered, number = sorted(samples), len(samples)
        ranks = [each for each in range(1, (number + 1) // 2 + 1) if _confidence(number, each) >= LEVEL]
        rank = max(ranks, default=1)
        return cls(statistics.median(ordered), ordered[rank - 1], ordered[number - rank], _confidence(number, rank))

    @classmethod
    def of_ratio(cls, parts: Sequence[float], wholes: Sequence[float], draws: int = 1000, seed: int = 0) -> Estimate:
        """Estimate sum(parts) / sum(wholes), with a 95 % percentile bootstrap over the pairs (Efron, 1979).

        Whole pairs are drawn again, so they must be independent: sequences or prompts, not positions. Wholes are
        positive.

        Raises:
            ValueError: there are no pairs, or not as many of both.
        """
        if not parts or len(parts) != len(wholes):
            raise ValueError(f"a ratio needs samples in pairs, got {len(parts)} parts and {len(wholes)} wholes")
        value = sum(parts) / sum(wholes)
        if len(parts) == 1:
            return cls(value, value, value)
        drawn = np.random.default_rng(seed).integers(len(parts), size=(draws, len(parts)))
        ratios = np.asarray(parts, float)[drawn].sum(1) / np.asarray(wholes, float)[drawn].sum(1)
        low, high = np.quantile(ratios, [0.025, 0.975]).tolist()
        return cls(value, min(low, value), max(high, value), 0.95)

    @classmethod
    def of_share(cls, successes: float, trials: float) -> Estimate | None:
        """Estimate a share of independent trials, with Wilson's 95 % score interval (1927); None without trials.

        Both numbers may be expected ones.
        """
        if trials <= 0:
            return None
        share = min(max(successes / trials, 0.0), 1.0)
        square = _Z * _Z / trials
        middle = (share + square / 2) / (1 + square)
        half = _Z / (1 + square) * math.sqrt(share * (1 - share) / trials + square / (4 * trials))
        return cls(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)), 0.95)

    def agrees_with(self, other: Estimate) -> bool:
        """Return whether the difference of two independent values lies within its own interval (Newcombe, 1998)."""
        upper, lower = (self, other) if self.value >= other.value else (other, self)
        spread = math.hypot(upper.value - upper.low, lower.high - lower.value)
        return upper.value - lower.value <= spread + 1e-12

    def shown(self, digits: int) -> str:
        """Return it as tables show it: `1.23 (1.10-1.31)`."""
        return f"{self.value:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"

    def to_dict(self) -> dict[str, float]:
        """Return everything, ready for JSON."""
        return asdict(self)


def _confidence(number: int, rank: int) -> float:
    outside = 2 * sum(math.comb(number, below) for below in range(rank))
    return 1.0 - float(outside / 2**number)
