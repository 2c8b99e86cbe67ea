"""A text whose tokens are coloured by the cheapest draft that would have been right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from selfspec.tools.studies.report.panels import Panel, coloured

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Characters of a line, lines in all, and lines of one text.
_ACROSS, _DOWN, _EACH = 76, 14, 4
NONE = "only the full model"
GREY = "#BBBBBB"
LINE_END = "↵"


def draw_tokens(axes: Axes, panel: Panel, drafts: Sequence[str], colours: Sequence[str]) -> None:
    """Draw the beginnings of a panel's texts, letter by letter on a grid."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch, Rectangle

    cells = list(_cells(panel, drafts))
    boxes = [Rectangle((cell.column, cell.row), 1, 0.94) for cell in cells]
    shades = [GREY if cell.draft is None else colours[cell.draft % len(colours)] for cell in cells]
    axes.add_collection(PatchCollection(boxes, facecolors=shades, edgecolors="none", alpha=0.45))
    for cell in cells:
        if not cell.letter.isspace():
            letter = axes.text(
                cell.column + 0.5,
                cell.row + 0.5,
                cell.letter,
                family="monospace",
                fontsize=5.2,
                ha="center",
                va="center",
                parse_math=False,
            )
            # A thousand letters, none of which the layout need look at.
            letter.set_in_layout(False)
    axes.set_xlim(0, _ACROSS)
    axes.set_ylim(_DOWN, 0)
    axes.set_axis_off()
    patches = [Patch(color=colours[index % len(colours)], alpha=0.45) for index in range(len(drafts))]
    axes.legend(
        [*patches, Patch(color=GREY, alpha=0.45)],
        [*drafts, NONE],
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=2,
        title="cheapest draft that would have been right",
        title_fontsize=6.5,
    )


@dataclass(frozen=True)
class _Cell:
    """One letter on the grid, and the draft that would have been right, if any."""

    column: int
    row: int
    letter: str
    draft: int | None


def _cells(panel: Panel, drafts: Sequence[str]) -> Iterator[_Cell]:
    """The texts one below the other, as many as there is room for."""
    column = row = 0
    for number, text in enumerate(panel.tokens):
        last = min(_DOWN, row + _EACH)
        for token, draft in zip(text, coloured(panel, drafts, number), strict=True):
            for letter in printable(token):
                if column >= _ACROSS:
                    column, row = 0, row + 1
                if row >= last:
                    break
                yield _Cell(column, row, letter, draft)
                column += 1
                if letter == LINE_END:
                    column, row = 0, row + 1
        column, row = 0, min(row + 1 + bool(column), last + 1)
        if row >= _DOWN:
            return


def printable(token: str) -> str:
    """A token with what cannot be seen made visible, but for spaces."""
    shown = token.replace("\r", "").replace("\t", "    ").replace("\n", LINE_END)
    return "".join(letter if letter.isprintable() else "·" for letter in shown)
