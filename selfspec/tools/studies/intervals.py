"""Confidence intervals of shares and of means over texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Of a normal distribution, 95 % lies within so many standard deviations.
_Z = 1.959964


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval.

    Attributes:
        value: the estimate.
        low: lower end.
        high: upper end.
    """

    value: float
    low: float
    high: float

    def meets(self, other: Interval) -> bool:
        """Whether the difference of two independent values lies within its own interval (Newcombe, 1998)."""
        upper, lower = (self, other) if self.value >= other.value else (other, self)
        spread = math.hypot(upper.value - upper.low, lower.high - lower.value)
        return upper.value - lower.value <= spread + 1e-12


def wilson(successes: float, trials: float) -> Interval | None:
    """A share with Wilson's score interval (1927); None without trials.

    Args:
        successes: number, or expected number, of successes.
        trials: the same of trials.
    """
    if trials <= 0:
        return None
    share = min(max(successes / trials, 0.0), 1.0)
    square = _Z * _Z / trials
    middle = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(share * (1 - share) / trials + square / (4 * trials))
    return Interval(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def ratio(parts: Sequence[float], wholes: Sequence[float]) -> Interval:
    """sum(parts) / sum(wholes), with the linearised interval of a ratio over independent texts.

    Args:
        parts: of each text.
        wholes: of each text, positive.
    """
    number, total = len(parts), sum(wholes)
    value = sum(parts) / total
    if number < 2:
        return Interval(value, value, value)
    squares = sum((part - value * whole) ** 2 for part, whole in zip(parts, wholes, strict=True))
    half = _Z * math.sqrt(squares * number / (number - 1)) / total
    return Interval(value, value - half, value + half)
