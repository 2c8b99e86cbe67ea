"""Estimates of medians, ratios and shares, each with its interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.9
"""The least confidence of a median's interval, where there are enough samples for it."""

# How much better than its tokens a pass a draft may look.
_NOISE = 1.1
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A quantity and an interval about it.

    Attributes:
        value: the estimate.
        low: lower end of the interval.
        high: upper end.
        confidence: the chance that such an interval holds the true value; 0 where a single sample tells nothing.
    """

    value: float
    low: float
    high: float
    confidence: float = 0.0

    @classmethod
    def of_median(cls, samples: Sequence[float]) -> Estimate:
        """Estimate a median, with the narrowest interval between order statistics of confidence `LEVEL` or more.

        It assumes no distribution: the interval between the k-th smallest and the k-th largest of n samples misses the
        median with probability 2 P(B < k), where B is binomial with n trials of 1/2. Of fewer than five samples it is
        their range.
        """
        from scipy.stats import binom

        if not samples:
            raise ValueError("no samples to take the median of")
        ordered, number = sorted(samples), len(samples)
        rank = max(int(binom.ppf((1 - LEVEL) / 2, number, 0.5)), 1)
        confidence = 1 - 2 * float(binom.cdf(rank - 1, number, 0.5))
        return cls(statistics.median(ordered), ordered[rank - 1], ordered[number - rank], confidence)

    @classmethod
    def of_ratio(cls, parts: Sequence[float], wholes: Sequence[float], draws: int = 1000, seed: int = 0) -> Estimate:
        """Estimate sum(parts) / sum(wholes), with a 95 % percentile bootstrap over the pairs (Efron, 1979).

        Pairs must be independent: sequences or prompts, not positions. Wholes are positive.
        """
        from scipy.stats import bootstrap

        if not parts or len(parts) != len(wholes):
            raise ValueError(f"a ratio needs samples in pairs, got {len(parts)} parts and {len(wholes)} wholes")
        value = sum(parts) / sum(wholes)
        if len(parts) == 1:
            return cls(value, value, value)

        def ratio(drawn: _Floats, others: _Floats, axis: int) -> _Floats:
            drawn_ratio: _Floats = drawn.sum(axis) / others.sum(axis)
            return drawn_ratio

        how = {"n_resamples": draws, "method": "percentile", "rng": np.random.default_rng(seed)}
        ends = bootstrap((parts, wholes), ratio, paired=True, vectorized=True, **how).confidence_interval
        return cls(value, min(float(ends.low), value), max(float(ends.high), value), 0.95)

    @classmethod
    def of_share(cls, successes: float, trials: float) -> Estimate | None:
        """Estimate a share of independent trials, counted or expected, with Wilson's 95 % score interval (1927)."""
        from scipy.stats import binomtest

        if trials <= 0:
            return None
        share, number = min(max(successes / trials, 0.0), 1.0), max(round(trials), 1)
        ends = binomtest(round(share * number), number).proportion_ci(0.95, method="wilson")
        return cls(share, min(share, float(ends.low)), max(share, float(ends.high)), 0.95)

    def agrees_with(self, other: Estimate) -> bool:
        """Return whether the difference of two independent values lies within its own interval (Newcombe, 1998)."""
        upper, lower = (self, other) if self.value >= other.value else (other, self)
        spread = math.hypot(upper.value - upper.low, lower.high - lower.value)
        return upper.value - lower.value <= spread + 1e-12

    def doubt(self, tokens_a_pass: float) -> str | None:
        """Say why a speed-up cannot be, as it is more than tokens a pass allow and noise explains; None: it can."""
        if self.low <= _NOISE * tokens_a_pass:
            return None
        return (
            f"{self.value:.2f} times plain decoding with {tokens_a_pass:.2f} times its tokens a pass cannot be; the "
            "machine did something else at times"
        )

    def shown(self, digits: int) -> str:
        """Return it as tables show it: `1.23 (1.10-1.31)`; without an interval where a single sample gave none."""
        if not self.confidence and self.low == self.high:
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"

    def to_dict(self) -> dict[str, float]:
        """Return everything, ready for JSON."""
        return asdict(self)


def holm_rejects(p_values: Sequence[float], level: float) -> list[bool]:
    """Return which hypotheses Holm's step-down procedure (1979) rejects at a family-wise level."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected
