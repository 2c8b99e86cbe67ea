"""The same draft length every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.control.budget import Budget
from selfspec.control.controller import Control, Controller, check_length
from selfspec.control.costs import CostsByRows


@dataclass(frozen=True)
class FixedLength(Control):
    """The same draft length every round.

    Attributes:
        length: tokens to draft, at least 1.
    """

    length: int

    def __post_init__(self) -> None:
        check_length(self.length)

    def begin(self, costs: CostsByRows) -> Controller:
        return FixedController(self.length)


class FixedController(Controller):
    """Decides for `FixedLength`."""

    def __init__(self, length: int) -> None:
        self.most = Budget.chain(length)

    def budget(self, remaining: int, unfinished: Sequence[bool]) -> Budget:
        return self.most.within(remaining - 1)
