"""Drafting with whole layers left out, which ones as the text goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.declaration import drafter, read_number
from selfspec.draft.layer_skip import LayerSkip
from selfspec.draft.path_choice import FAMILY, TOKENS, ChosenPath, tokens_of
from selfspec.draft.path_trial import PathTrial, Trial
from selfspec.draft.rows_view import RowsView
from selfspec.errors import DraftConfigError
from selfspec.values import shown


@drafter(
    "clasp",
    argument=":M",
    example="clasp:8",
    help="all but M layers, which are chosen every few rounds",
)
@dataclass(frozen=True)
class ChosenSkips(ChosenPath):
    """Self-speculation with a skip set that follows the text, as in CLaSp (Chen et al., 2025, arXiv 2505.24196).

    Attributes:
        layers: how many layers a draft leaves out, M. The first set leaves out every so many.
    """

    layers: int

    @property
    def looked_for(self) -> int:
        return self.layers

    @property
    def own_nodes(self) -> int:
        return TOKENS * (1 + self.layers + FAMILY)

    def family(self, depth: int) -> Sequence[LayerPathDrafter]:
        if type(self.layers) is not int or not 1 <= self.layers <= depth - 2:
            raise DraftConfigError(
                f"a draft leaves out {shown(self.layers)} layers; this model has {depth}, choose 1..{depth - 2}"
            )
        # Neither the first layer nor the last.
        inner = depth - 2
        return [LayerSkip(layers=[1 + (2 * each + 1) * inner // (2 * self.layers) for each in range(self.layers)])]

    def trial(self, family: Sequence[LayerPathDrafter], depth: int, rows: RowsView) -> Trial:
        skipped = tuple(frozenset(each.layer for each in path.path(depth).skipped) for path in family)
        return PathTrial(tokens_of(rows), rows.greedy, self.layers, skipped)

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> ChosenSkips:
        return cls(read_number(argument))

    @property
    def spelling(self) -> str:
        return f"clasp:{self.layers}"
