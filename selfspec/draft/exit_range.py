"""Drafting by leaving the network early, where as the text goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.declaration import drafter, read_number
from selfspec.draft.early_exit import EarlyExit
from selfspec.draft.path_choice import ChosenPath, tokens_of
from selfspec.draft.path_trial import ExitTrial, Trial
from selfspec.draft.rows_view import RowsView
from selfspec.errors import DraftConfigError
from selfspec.values import shown


@drafter(
    "del",
    argument=":E-F",
    example="del:2-6",
    help="early exit at a layer from E to F, which is chosen every few rounds",
)
@dataclass(frozen=True)
class ChosenExit(ChosenPath):
    """Self-speculation from an exit that follows the text, as in DEL (Zarch et al., 2025, arXiv 2504.05598).

    The draft length is the control's choice, as for all drafts.

    Attributes:
        earliest: the first exit layer.
        latest: the last one.
    """

    earliest: int
    latest: int

    def __post_init__(self) -> None:
        if type(self.earliest) is not int or type(self.latest) is not int or self.earliest >= self.latest:
            raise DraftConfigError(
                f"exits are two integers, the earlier one first, got {shown(self.earliest)} and {shown(self.latest)}; "
                "write e.g. ChosenExit(2, 6)"
            )

    def family(self, depth: int) -> Sequence[LayerPathDrafter]:
        middle = (self.earliest + self.latest) // 2
        return [
            EarlyExit(layer) for layer in (middle, *range(self.earliest, middle), *range(middle + 1, self.latest + 1))
        ]

    def trial(self, family: Sequence[LayerPathDrafter], depth: int, rows: RowsView) -> Trial:
        return ExitTrial(
            tokens_of(rows), rows.greedy, tuple(each.layer for each in family if isinstance(each, EarlyExit))
        )

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> ChosenExit:
        first, _, last = (argument or "").partition("-")
        return cls(read_number(first), read_number(last))

    @property
    def spelling(self) -> str:
        return f"del:{self.earliest}-{self.latest}"
