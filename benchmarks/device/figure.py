"""Figures of a case, each a number with its spread, a word, or the reason why there is none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from selfspec.errors import DraftConfigError, UnsupportedModelError, UnsupportedOptionError
from selfspec.measure.estimate import Estimate

REFUSALS = (DraftConfigError, UnsupportedModelError, UnsupportedOptionError)
"""Errors of selfspec where a device, or a model on it, lacks something; the message names it."""


@dataclass(frozen=True)
class Figure:
    """A figure, or why there is none: exactly one of `value`, `cannot` and `failed` is given.

    Attributes:
        value: a number, the median of `samples` where there are any, or a word.
        unit: of the number.
        low: lower end of the median's interval; None: it is no median.
        high: upper end.
        samples: what the median is of, where that is known.
        cannot: what this device lacks for it.
        failed: what was raised where it should have been measured: type and message.
    """

    value: float | str | None = None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    samples: tuple[float, ...] = ()
    cannot: str | None = None
    failed: str | None = None

    def __post_init__(self) -> None:
        numbers = (self.value, self.low, self.high, *self.samples)
        if any(isinstance(each, float) and not math.isfinite(each) for each in numbers):
            raise ValueError(f"a figure came out as {self.value} ({self.low}-{self.high})")

    @classmethod
    def of(cls, samples: Sequence[float], unit: str) -> Figure:
        """Return the median of some samples, at least one, with its interval."""
        estimate = Estimate.of_median(samples)
        return cls(estimate.value, unit, estimate.low, estimate.high, tuple(samples))

    @classmethod
    def estimated(cls, estimate: Estimate, unit: str = "", times: float = 1.0) -> Figure:
        """An estimate, in another unit where it is multiplied."""
        numbers = [each * times for each in (estimate.value, estimate.low, estimate.high)]
        return cls(numbers[0], unit, numbers[1], numbers[2])

    @classmethod
    def number(cls, value: float | None, unit: str = "", lacking: str = "it is not known here") -> Figure:
        """Return a count or a mean; without one, what is lacking."""
        if value is None or not math.isfinite(value):
            return cls(cannot=lacking)
        return cls(value, unit)

    @property
    def shown(self) -> str:
        """As tables show it."""
        if self.cannot is not None:
            return "cannot"
        if self.failed is not None:
            return "FAILED"
        if isinstance(self.value, str) or self.value is None:
            return str(self.value)
        spread = "" if self.low is None or self.high is None else f" ({_short(self.low)}-{_short(self.high)})"
        return f"{_short(self.value)}{spread}{self.unit and ' '}{self.unit}"


Rows = Mapping[str, Mapping[str, Figure]]
"""Results of a case: figures by name, in rows by name. The name of a case's only row may be empty."""


def lacking(error: Exception) -> Figure:
    """Return the figure that was refused, or that failed, with this error."""
    words = " ".join(str(error).split())
    if isinstance(error, REFUSALS):
        return Figure(cannot=words)
    return Figure(failed=f"{type(error).__name__}: {words}"[:_MOST_WORDS])


# A compiler's whole output is no message.
_MOST_WORDS = 600


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
