"""Costs of the parts of a round, in steps of plain decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Protocol, runtime_checkable

import torch

from selfspec.arguments import check_kind, is_finite, is_whole
from selfspec.errors import DraftConfigError

# A round that drafts runs a whole target pass, parts computed by the draft included; measured times below that are
# noise.
_LEAST_ROUND = 1.0


@runtime_checkable
class CostsByRows(Protocol):
    """Gives the costs of the parts of a round in a batch of any size."""

    def in_batch(self, rows: int) -> Costs:
        """Return the costs of rounds over `rows` rows, at least 1."""


@dataclass(frozen=True)
class Costs:
    """Holds the terms of the speed-up formula (Leviathan et al., 2023), in steps of plain decoding.

    Attributes:
        draft: c, a draft step with its head; 0 for a draft that runs no model.
        verify: V(1), a target pass over one token; above 1 if drafting makes it slower.
        widening: cost that each further token of the block adds to V.
        overhead: o, everything else in a round that drafts.
        out_of_step: time of a pass over rows at different places, by that of a pass in lockstep, at least 1.
        rows: number of rows of the batch.
        each_row: cost that a further row adds to a pass over one token per row, if above `widening`.

    Raises:
        DraftConfigError: a number is not finite, or too small.
    """

    draft: float
    verify: float = 1.0
    widening: float = 0.0
    overhead: float = 0.0
    # Measured on a model of 2M parameters; larger models have less.
    out_of_step: float = 1.2
    rows: int = 1
    each_row: float = 0.0

    def __post_init__(self) -> None:
        numbers = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, number in numbers.items():
            if not is_finite(number):
                raise DraftConfigError(f"costs must be finite numbers, got {name}={number!r}")
            if name == "rows" and not is_whole(number):
                raise DraftConfigError(f"costs are of a whole number of rows, got rows={number!r}")
            least = 1 if name in ("rows", "out_of_step") else 0
            # The overhead is measured as a difference, and may be negative.
            if name != "overhead" and number < least:
                raise DraftConfigError(f"of costs {name} is at least {least}, got {number!r}")
        if self.verify == 0:
            raise DraftConfigError(
                "a target pass costs something, got verify=0; 1.0 is what a step of plain decoding is"
            )

    @classmethod
    def assumed(cls, draft: float, device: torch.device, widening: float = 0.0) -> Costs:
        """Make costs from c and `widening`, the cost of a further token's own reads; the rest is as was measured."""
        # Two CPUs were measured, and no GPU.
        each_row = 0.08 if device.type == "cpu" else 0.0
        return cls(draft, verify=1.1, widening=0.03 + widening, overhead=0.05, each_row=each_row + widening)

    def in_batch(self, rows: int) -> Costs:
        """Return the costs for another number of rows; the cost of a pass is linear in its tokens."""
        # The slope is the cost of a further token; for more rows that of a further row, if larger.
        each = self.widening / self.rows
        if rows > self.rows:
            each = max(each, self.each_row)
        step = max(1 + each * (rows - self.rows), each * rows)
        return replace(
            self, widening=each * rows / step, overhead=self.overhead / step, rows=rows, each_row=self.each_row / step
        )

    def of_round(self, steps: float, drafted: int) -> float:
        """Return the cost of a round with `steps` draft steps and a target pass that verifies `drafted` tokens."""
        return max(steps * self.draft + self.verify + drafted * self.widening + self.overhead, _LEAST_ROUND)


@dataclass(frozen=True)
class CostsOfReading:
    """Gives costs by the bytes read; `costs` are for an empty text, `step` is the weights that a target step reads."""

    costs: Costs
    step: int

    def in_batch(self, rows: int) -> Costs:
        return self.costs.in_batch(rows)

    def behind(self, target: float, draft: float) -> Costs:
        """Return the costs after texts, by the bytes of keys and values that a target step and a draft step read."""
        step = 1 + target / self.step
        return replace(
            self.costs,
            draft=(self.costs.draft + draft / self.step) / step,
            verify=1 + (self.costs.verify - 1) / step,
            widening=self.costs.widening / step,
            overhead=self.costs.overhead / step,
            each_row=self.costs.each_row / step,
        )


@dataclass(frozen=True)
class RaggedCosts:
    """Gives the costs of batches whose rows are always at different places, with drafts or without."""

    costs: CostsByRows

    def in_batch(self, rows: int) -> Costs:
        return replace(self.costs.in_batch(rows), out_of_step=1.0)


@dataclass(frozen=True)
class BatchCosts:
    """Gives the costs of rounds that were measured in batches of different sizes; they are not linear in the rows.

    Attributes:
        measured: costs for each measured number of rows, the smallest first.

    Raises:
        DraftConfigError: there are none, two have the same number of rows, or they are out of order.
    """

    measured: tuple[Costs, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.measured, list | tuple):
            raise DraftConfigError(f"the measured costs are a tuple of Costs, got {self.measured!r}")
        for costs in self.measured:
            check_kind("each of the measured costs", costs, Costs, "write BatchCosts((Costs(draft=0.3),))")
        sizes = [costs.rows for costs in self.measured]
        if not sizes or sizes != sorted(set(sizes)):
            raise DraftConfigError(f"costs are measured once for each number of rows, in order, got {sizes}")

    def in_batch(self, rows: int) -> Costs:
        """Return the costs of rounds over `rows` rows, linear in log(rows) between measured sizes."""
        smaller = [costs for costs in self.measured if costs.rows <= rows]
        larger = [costs for costs in self.measured if costs.rows >= rows]
        if not smaller or not larger or smaller[-1] is larger[0]:
            return (smaller[-1:] or larger)[0].in_batch(rows)
        below, above = smaller[-1], larger[0]
        share = math.log(rows / below.rows) / math.log(above.rows / below.rows)

        def between(name: str) -> float:
            one, other = getattr(below, name), getattr(above, name)
            return float(one + (other - one) * share)

        linear = {name: between(name) for name in ("draft", "verify", "widening", "overhead", "each_row")}
        # A single row is always in step.
        return Costs(**linear, rows=rows, out_of_step=above.out_of_step if below.rows == 1 else between("out_of_step"))


# Acceptance rate of a good draft, and the length beyond which it gains less than a billionth of a token.
_GOOD = 0.85
_LONG_DRAFT = 128
# Acceptance rate of a token out of a prediction whose place is known.
_PREDICTED = 0.97


@dataclass(frozen=True)
class Forecast:
    """Holds the best predicted speed-up of a draft over plain decoding, and its draft length."""

    draft_length: int
    speedup: float


def speedup(alpha: float, draft_length: int, costs: Costs) -> float:
    """Predict (1 - alpha^(gamma+1)) / ((1 - alpha) (gamma c + V(gamma+1) + o)), after Leviathan et al. (2023)."""
    return expected_tokens(alpha, draft_length) / costs.of_round(draft_length, draft_length)


def expected_tokens(alpha: float, draft_length: int) -> float:
    """Return the mean tokens that a round commits if every draft token has acceptance rate `alpha`."""
    return sum(alpha**accepted for accepted in range(draft_length + 1))


def forecast(alpha: float, costs: Costs, longest: int = 8) -> Forecast:
    """Find the draft length up to `longest` with the highest predicted speed-up."""
    best = max(range(1, longest + 1), key=lambda length: speedup(alpha, length, costs))
    return Forecast(best, speedup(alpha, best, costs))


class Prospects:
    """Predicts what drafts of at most `longest` tokens may gain or lose by the costs of a batch.

    `of_model` and `of_look_up` are the plain steps that the shortest round may lose; 0 if a good draft would pay.
    """

    def __init__(self, costs: Costs, longest: int) -> None:
        self._costs = costs
        self._longest = longest
        self._lengths = range(1, min(longest, _LONG_DRAFT) + 1)
        self.of_model, self.of_look_up = self._risk(steps=1), self._risk(steps=0)

    def look_up_length(self, share: float) -> int:
        """Return how many tokens to look up if a share of the slowest rows has a match; 0: look-ups would not pay."""
        # In a single row a look-up costs next to nothing; in a batch each token is one more in every row.
        if self._costs.rows == 1:
            return self._longest
        best = max(self._lengths, key=lambda length: self._speed(0, length, share))
        return best if share == 1 or self._speed(0, best, share) > 1 else 0

    def predicted_length(self, share: float, longest: int) -> int:
        """Return how many tokens, up to `longest`, to draft out of predictions that this share of the rows has."""
        if self._costs.rows == 1:
            return longest
        lengths = [longest >> halved for halved in range(max(longest, 1).bit_length())]
        speeds = {length: self._speed(0, length, share, _PREDICTED) for length in lengths}
        best = max(lengths, key=lambda length: speeds[length])
        return best if speeds[best] > 1 else 0

    def _risk(self, steps: int) -> float:
        pays = any(self._speed(steps, length) > 1 for length in self._lengths)
        return 0.0 if pays else self._costs.of_round(steps, 1) - 1

    def _speed(self, steps: int, length: int, share: float = 1.0, chance: float = _GOOD) -> float:
        """Return the mean tokens of a row per plain step."""
        rows, cost = self._costs.rows, self._costs.of_round(steps * length, length)
        out_of_step = self._costs.out_of_step if rows > 1 else 1.0
        apart = (1 + share * (expected_tokens(chance, length) - 1)) / (cost * out_of_step)
        # In lockstep only tokens accepted in every row count.
        together = expected_tokens(chance**rows if share == 1 else 0.0, length) / cost
        return max(apart, together)
