"""Define controls with a fixed draft length, or with a confidence threshold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from selfspec.arguments import is_finite
from selfspec.control.controller import Control, Controller, check_length, check_nodes
from selfspec.control.costs import CostsByRows
from selfspec.draft.draft import Budget
from selfspec.errors import DraftConfigError


@dataclass(frozen=True)
class FixedLength(Control):
    """Drafts with the same length every round.

    When sampling, a row's chains depend only on that row and on what the wrapper knew before the call, so a seed gives
    the same tokens whatever other rows are in the batch. Trees have one shape for all rows, which depends on all rows.

    Attributes:
        length: tokens to draft, at least 1; levels of a tree.
        nodes: tokens to draft in all, at least `length`; more make a tree with at most six children per node. None: a
            chain.
    """

    length: int
    nodes: int | None = None

    def __post_init__(self) -> None:
        check_length(self.length)
        if self.nodes is not None:
            check_nodes(self.nodes, self.length)

    def begin(self, costs: CostsByRows) -> Controller:
        most = Budget(self.length, self.nodes or self.length)
        return Controller(most, rows_apart=most.nodes == most.depth, costs=costs.in_batch(1))


@dataclass(frozen=True)
class ConfidenceStop(Control):
    """Drafts until a token's confidence, the largest probability of its q, falls below a threshold in 0..1.

    Under exact rules the token below the threshold stays in the draft. In a batch, drafting ends when no unfinished row
    is confident. A draft has at most `longest` tokens.
    """

    threshold: float = 0.5
    longest: int = 7

    def __post_init__(self) -> None:
        check_length(self.longest)
        if not is_finite(self.threshold) or not 0 <= self.threshold <= 1:
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
