"""What the parts of a round cost, in steps of plain decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Protocol, runtime_checkable

import torch

from selfspec.arguments import check_kind
from selfspec.errors import DraftConfigError
from selfspec.values import is_whole

# A round that drafts makes a whole target pass, what drafts made of it included; where measured times say otherwise,
# it is noise.
_LEAST_ROUND = 1.0


@runtime_checkable
class CostsByRows(Protocol):
    """Says what the parts of a round cost in a batch of any size."""

    def in_batch(self, rows: int) -> Costs:
        """The costs of rounds over `rows` rows, at least 1."""


@dataclass(frozen=True)
class Costs:
    """The terms of the speed-up formula, after Leviathan et al. (2023). The unit is one step of plain decoding.

    Attributes:
        draft: c, a draft step, head included; 0 for a draft that runs no model.
        verify: V(1), a target pass over a single token; more than 1 where drafting costs it something extra.
        widening: what every further token of the block adds to V.
        overhead: o, all else in a round that drafts.
        out_of_step: how long a pass takes over rows of a batch that are at different places, in passes over rows at
            one place. 1.2 was measured on a model of 2M parameters; the larger the model, the less it is.
        rows: of the batch that all this is about.
        each_row: what a further row adds to a pass over one token of each, where it is more than a further token of a
            block does by `widening`: kernels for a few rows in all do not help batches.

    Raises:
        DraftConfigError: a number is not finite, or below what it can be.
    """

    draft: float
    verify: float = 1.0
    widening: float = 0.0
    overhead: float = 0.0
    out_of_step: float = 1.2
    rows: int = 1
    each_row: float = 0.0

    def __post_init__(self) -> None:
        numbers = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, number in numbers.items():
            if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
                raise DraftConfigError(f"costs must be finite numbers, got {name}={number!r}")
            if name == "rows" and not is_whole(number):
                raise DraftConfigError(f"costs are of a whole number of rows, got rows={number!r}")
            least = 1 if name in ("rows", "out_of_step") else 0
            # What is left of a round beside its passes is measured as a difference, and may be negative.
            if name != "overhead" and number < least:
                raise DraftConfigError(f"of costs {name} is at least {least}, got {number!r}")
        if self.verify == 0:
            raise DraftConfigError(
                "a target pass costs something, got verify=0; 1.0 is what a step of plain decoding is"
            )

    @classmethod
    def assumed(cls, draft: float, device: torch.device, widening: float = 0.0) -> Costs:
        """Where only c is known: what a target pass and all else cost on the machines that were looked at.

        Args:
            draft: c.
            device: that passes run on.
            widening: what a further token of a pass reads for itself, in steps.
        """
        # Two CPUs were looked at, and no GPU.
        each_row = 0.08 if device.type == "cpu" else 0.0
        return cls(draft, verify=1.1, widening=0.03 + widening, overhead=0.05, each_row=each_row + widening)

    def in_batch(self, rows: int) -> Costs:
        """The same for another number of rows, taking a pass to cost in proportion to its tokens.

        For more rows than these that is by what a further row adds, for fewer by what a further token does.

        Each further token of a block is one more in every row, so blocks widen a pass the more the larger the batch.
        """
        each = self.widening / self.rows
        if rows > self.rows:
            each = max(each, self.each_row)
        step = max(1 + each * (rows - self.rows), each * rows)
        return replace(
            self,
            widening=each * rows / step,
            overhead=self.overhead / step,
            rows=rows,
            each_row=self.each_row / step,
        )

    def of_round(self, steps: float, drafted: int) -> float:
        """Return the cost of a round: of its draft steps, and of a target pass that verifies `drafted` tokens."""
        return max(steps * self.draft + self.verify + drafted * self.widening + self.overhead, _LEAST_ROUND)


@dataclass(frozen=True)
class CostsOfReading:
    """The costs of rounds by what passes read: weights, and keys and values of the text, which grow with it.

    Attributes:
        costs: where there is no text.
        step: bytes of the weights that a target step reads.
    """

    costs: Costs
    step: int

    def in_batch(self, rows: int) -> Costs:
        """The costs of rounds over `rows` rows of short texts."""
        return self.costs.in_batch(rows)

    def behind(self, target: float, draft: float) -> Costs:
        """The costs behind texts of which a target step and a draft step read so many bytes of keys and values."""
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
    """The costs of batches whose rows are at different places anyhow, with drafts or without."""

    costs: CostsByRows

    def in_batch(self, rows: int) -> Costs:
        """The same costs, without a price for being out of step."""
        return replace(self.costs.in_batch(rows), out_of_step=1.0)


@dataclass(frozen=True)
class BatchCosts:
    """The costs of rounds as they were measured in batches of different sizes.

    What a further row costs follows no line: products of a few rows run at the speed of memory, those of many rows at
    that of arithmetic, and kernels change in between.

    Attributes:
        measured: one for each number of rows, the smallest first.

    Raises:
        DraftConfigError: there are none, two are of one size, or they are in another order.
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
        """Return the costs of rounds over `rows` rows.

        Between two measured sizes they are interpolated, linearly in the logarithm of the number of rows. Beyond the
        smallest and the largest size, `Costs.in_batch` of that size is taken.
        """
        smaller = [costs for costs in self.measured if costs.rows <= rows]
        larger = [costs for costs in self.measured if costs.rows >= rows]
        if not smaller or not larger or smaller[-1] is larger[0]:
            return (smaller[-1:] or larger)[0].in_batch(rows)
        below, above = smaller[-1], larger[0]
        share = math.log(rows / below.rows) / math.log(above.rows / below.rows)

        def between(one: float, other: float) -> float:
            return one + (other - one) * share

        return Costs(
            draft=between(below.draft, above.draft),
            verify=between(below.verify, above.verify),
            widening=between(below.widening, above.widening),
            overhead=between(below.overhead, above.overhead),
            # A single row is always in step.
            out_of_step=above.out_of_step if below.rows == 1 else between(below.out_of_step, above.out_of_step),
            rows=rows,
            each_row=between(below.each_row, above.each_row),
        )
