"""The colours of every picture: one for each kind of draft, told apart by colour-blind readers too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from selfspec.draft.registry import AUTO, kinds, parts_of

# The qualitative palette of Okabe and Ito (2008), and two of Tol (2021) that go with it.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, OLIVE, WINE = "#E69F00", "#56B4E9", "#000000", "#999933", "#882255"
GREY, PALE = "#777777", "#BBBBBB"
SEQUENCE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, OLIVE, WINE)
"""For what is no kind of draft: in this order."""

STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # names may hold dollar signs
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.markersize": 4.5,
}
"""Settings of matplotlib that every picture shares."""

Dashes = str | tuple[int, tuple[int, ...]]
_DASHES: tuple[Dashes, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
_MARKERS = ("o", "s", "^", "d", "v", "p", "*", "X", "h")


@dataclass(frozen=True)
class Mark:
    """How something is drawn wherever it is drawn.

    Attributes:
        colour: as `#RRGGBB`.
        marker: of matplotlib.
        dashes: of a line, which tell apart what has the same colour.
        filled: whether markers are; those of cascades are not.
    """

    colour: str
    marker: str
    dashes: Dashes = "-"
    filled: bool = True

    @property
    def of_line(self) -> dict[str, Any]:
        """Arguments of `Axes.plot` and `Axes.errorbar`."""
        face = self.colour if self.filled else "white"
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dashes, "markerfacecolor": face}


def mark_of(draft: str | None) -> Mark:
    """The mark of a draft by its name, such as `lookup+exit:4`; None: plain decoding."""
    if draft is None:
        return Mark(BLACK, "o")
    colours = [colour for colour in SEQUENCE if colour != BLACK]
    known = {**kinds(), AUTO: None}
    order = list(dict.fromkeys(known.values()))
    parts = [part for part in parts_of(draft) if not part.startswith("vocab")]
    # The last part of a cascade says its colour.
    for part in reversed(parts):
        name = part.removeprefix("union:").partition(":")[0]
        if name in known:
            turn, place = divmod(order.index(known[name]), len(colours))
            return Mark(colours[place], _MARKERS[turn], filled=len(parts) == 1)
    return Mark(GREY, "h")


def marks_of(drafts: Iterable[str]) -> dict[str, Mark]:
    """Marks of several drafts in one picture: those of one kind differ by dashes and markers."""
    return told_apart({draft: mark_of(draft) for draft in drafts})


def told_apart(marks: Mapping[str, Mark]) -> dict[str, Mark]:
    """The marks of one picture, by what is drawn: those of one colour differ by dashes and markers."""
    found: dict[str, Mark] = {}
    for name, own in marks.items():
        others = [each.marker for each in found.values() if each.colour == own.colour]
        alike = len(others)
        marker = _MARKERS[(alike - 1) % len(_MARKERS)] if own.marker in others else own.marker
        found[name] = Mark(own.colour, marker, _DASHES[alike % len(_DASHES)], own.filled)
    return found
