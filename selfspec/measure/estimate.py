"""An estimated quantity and how sure it is: medians with their quartiles, means with a bootstrap interval."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A quantity and a range about it.

    Attributes:
        value: the estimate.
        low: lower end of the range.
        high: upper end.
    """

    value: float
    low: float
    high: float

    @classmethod
    def of_median(cls, samples: Sequence[float]) -> Estimate:
        """The median, with the quartiles as its range.

        Raises:
            ValueError: there are no samples.
        """
        if not samples:
            raise ValueError("no samples to take the median of")
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(middle, low, high)

    @classmethod
    def of_ratio(
        cls, parts: Sequence[float], wholes: Sequence[float], level: float = 0.95, draws: int = 1000, seed: int = 0
    ) -> Estimate:
        """sum(parts) / sum(wholes), with a percentile bootstrap over the pairs (Efron, 1979) as its range.

        What is drawn again is whole pairs, so they must be independent: sequences or prompts, not positions.

        Args:
            parts: numerators.
            wholes: denominators, as many, their sum positive.
            level: of the interval.
            draws: resamples.
            seed: of the resampling.

        Raises:
            ValueError: there are no pairs, or not as many of both.
        """
        if not parts:
            raise ValueError("no samples to take the ratio of")
        pairs = list(zip(parts, wholes, strict=True))
        generator = random.Random(seed)
        ratios = sorted(_ratio(generator.choices(pairs, k=len(pairs))) for _ in range(draws))
        tail = (1 - level) / 2
        return cls(_ratio(pairs), ratios[int(tail * (draws - 1))], ratios[-1 - int(tail * (draws - 1))])

    def to_dict(self) -> dict[str, float]:
        """Ready for JSON."""
        return {"value": self.value, "low": self.low, "high": self.high}


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(part for part, _ in pairs) / sum(whole for _, whole in pairs)
