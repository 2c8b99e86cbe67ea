"""Estimates of medians, ratios and shares, each with its interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

LEVEL = 0.9
"""The least confidence of a median's interval, where there are enough samples for it."""

# How much better than its tokens a pass a draft may look.
_NOISE = 1.1
# Widths below this are of rounding alone.
_NO_WIDTH = 1e-12


@dataclass(frozen=True)
class Estimate:
    """A quantity and an interval about it.

    Attributes:
        value: the estimate.
        low: lower end of the interval.
        high: upper end.
        confidence: the chance that such an interval holds the true value; 0 where a single sample tells nothing.
        n: independent samples that it rests on, as texts; 0 where these were not counted.
    """

    value: float
    low: float
    high: float
    confidence: float = 0.0
    n: int = 0

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
        return cls(statistics.median(ordered), ordered[rank - 1], ordered[number - rank], confidence, number)

    @classmethod
    def of_mean(cls, sums: Sequence[float], counts: Sequence[float]) -> Estimate:
        """Estimate sum(sums) / sum(counts), with a 95 % interval by Student's t over a jackknife of the texts.

        Pairs are those of texts, which must be independent: sequences or prompts, not positions. Counts are positive.
        Each text is left out once, and the spread of the means without it is that of the estimate (Tukey, 1958), with
        n - 1 degrees of freedom. A single text has no interval.
        """
        return _jackknifed(sums, counts, np.asarray)

    @classmethod
    def of_ratio(cls, parts: Sequence[float], wholes: Sequence[float]) -> Estimate:
        """Estimate sum(parts) / sum(wholes) of positive numbers, as `of_mean` does its logarithm: no end is below 0."""
        if min([*parts, *wholes], default=1.0) <= 0:
            raise ValueError("a ratio is of positive numbers")
        return _jackknifed(parts, wholes, np.log).exp()

    @classmethod
    def of_speedup(cls, others: Sequence[Sequence[float]], own: Sequence[Sequence[float]]) -> Estimate:
        """Estimate how many times as fast texts are, from the times of each in the same turns: medians, as `of_ratio`.

        Over a single text nothing but its turns says how sure that is.
        """
        one, two = ([statistics.median(turns) for turns in side] for side in (others, own))
        found = cls.of_ratio(one, two)
        if len(own) > 1:
            return found
        turns = cls.of_median([each / mine for each, mine in zip(others[0], own[0], strict=True)])
        low, high = min(turns.low, found.value), max(turns.high, found.value)
        return replace(found, low=low, high=high, confidence=turns.confidence)

    @classmethod
    def of_rate(cls, successes: Sequence[float], trials: Sequence[float]) -> Estimate | None:
        """Estimate a share from the counts of several texts, as `of_mean` does but within 0 and 1; None of no trial.

        Where all texts agree, their spread says nothing, and the interval is Wilson's for their counts together.
        """
        pairs = [pair for pair in zip(successes, trials, strict=True) if pair[1] > 0]
        if not pairs:
            return None
        found = cls.of_mean(*map(list, zip(*pairs, strict=True)))
        if len(pairs) > 1 and found.high - found.low < _NO_WIDTH:
            found = replace(cls.of_share(*map(sum, zip(*pairs, strict=True))) or found, n=len(pairs))
        return replace(found, low=max(found.low, 0.0), high=min(found.high, 1.0))

    @classmethod
    def of_share(cls, successes: float, trials: float) -> Estimate | None:
        """Estimate a share of independent trials, counted or expected, with Wilson's 95 % score interval (1927)."""
        from scipy.stats import binomtest

        if trials <= 0:
            return None
        share, number = min(max(successes / trials, 0.0), 1.0), max(round(trials), 1)
        ends = binomtest(round(share * number), number).proportion_ci(0.95, method="wilson")
        return cls(share, min(share, float(ends.low)), max(share, float(ends.high)), 0.95)

    def exp(self) -> Estimate:
        """Return the estimate of a quantity whose logarithm this is."""
        return replace(self, value=math.exp(self.value), low=math.exp(self.low), high=math.exp(self.high))

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


def _jackknifed(parts: Sequence[float], wholes: Sequence[float], scale: Callable[[Any], Any]) -> Estimate:
    """Estimate `scale` of sum(parts) / sum(wholes), on that scale."""
    from scipy.stats import t

    if not parts or len(parts) != len(wholes):
        raise ValueError(f"a ratio needs samples in pairs, got {len(parts)} parts and {len(wholes)} wholes")
    drawn, of, number = np.asarray(parts, float), np.asarray(wholes, float), len(parts)
    value = float(scale(drawn.sum() / of.sum()))
    if number == 1:
        return Estimate(value, value, value, n=1)
    without = scale((drawn.sum() - drawn) / (of.sum() - of))
    spread = float(t.ppf(0.975, number - 1) * np.sqrt((number - 1) * np.var(without)))
    return Estimate(value, value - spread, value + spread, 0.95, number)


def holm_rejects(p_values: Sequence[float], level: float) -> list[bool]:
    """Return which hypotheses Holm's step-down procedure (1979) rejects at a family-wise level."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected
