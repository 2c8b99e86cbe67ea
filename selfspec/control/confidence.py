"""Draft until a token falls under a threshold of confidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

from selfspec.control.controller import Control, Controller, check_length
from selfspec.control.costs import CostsByRows
from selfspec.draft.draft import Budget
from selfspec.errors import DraftConfigError


@dataclass(frozen=True)
class ConfidenceStop(Control):
    """Drafts until a token's confidence, the largest probability where it was drawn, falls under a threshold in 0..1.

    Under exact rules the token that fell under it stays in the draft. In a batch, drafting ends when no unfinished row
    is confident. A draft has at most `longest` tokens.
    """

    threshold: float = 0.5
    longest: int = 7

    def __post_init__(self) -> None:
        check_length(self.longest)
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, Real) or not 0 <= self.threshold <= 1:
            raise DraftConfigError(f"a confidence threshold lies in 0..1, got {self.threshold!r}")

    def begin(self, costs: CostsByRows) -> Controller:
        return ConfidentController(self)


class ConfidentController(Controller):
    """Decides for `ConfidenceStop`."""

    def __init__(self, control: ConfidenceStop) -> None:
        super().__init__(Budget.chain(control.longest))
        self._threshold = control.threshold
        self._unfinished: Sequence[bool] = ()

    def budget(self, remaining: int, unfinished: Sequence[bool]) -> Budget:
        self._unfinished = unfinished
        return super().budget(remaining, unfinished)

    def goes_on(self, confidences: Callable[[], list[float]]) -> bool:
        found = zip(confidences(), self._unfinished, strict=True)
        return any(unfinished and confidence >= self._threshold for confidence, unfinished in found)
