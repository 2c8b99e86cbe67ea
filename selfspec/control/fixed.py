"""The same draft length every round."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.control.controller import Control, Controller, check_length
from selfspec.control.costs import CostsByRows
from selfspec.draft.draft import Budget


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
        return Controller(Budget.chain(self.length))
