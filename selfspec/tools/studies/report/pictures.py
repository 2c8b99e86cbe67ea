"""The pictures of a study, drawn with matplotlib for print."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec.files.writing import whole
from selfspec.measure.estimate import Estimate
from selfspec.tools.studies.report.files import KEPT
from selfspec.tools.studies.report.panels import Panel
from selfspec.tools.studies.table import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

# Distinct for colour-blind readers too (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#BBBBBB"
NONE = "only the full model"
LINE_END = "↵"
_MARKERS = {"exit": "o", "skip": "s", "skip-file": "D", "head": "^"}
# Inches of a panel and dots per inch; drafts that are told apart by colour.
_WIDTH, _HEIGHT, _DPI, _DRAFTS = 3.5, 2.9, 300, 5
# Characters of a line of coloured text, lines in all, and lines of one text.
_ACROSS, _DOWN, _EACH = 76, 14, 4
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 6.5,
    "legend.title_fontsize": 6.5,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "figure.facecolor": "white",
    # Names may hold dollar signs.
    "text.parse_math": False,
}


def draw_all(panels: Sequence[Panel], folder: Path) -> list[Path]:
    """Draw every picture that the study has data for, as PNG files.

    Raises:
        StorageError: one cannot be written.
    """
    import matplotlib

    # As many panels side by side as there are temperatures.
    across = max(1, min(3, len({panel.temperature for panel in panels})))
    drawn = []
    for picture in _PICTURES:
        shown = [panel for panel in panels if picture.has(panel)]
        if shown:
            drawn.append(folder / f"{picture.name}.png")
            with matplotlib.rc_context(_STYLE), whole(drawn[-1], KEPT) as draft:
                _draw(picture, shown, min(across, len(shown)), draft)
    return drawn


def _draw(picture: _Picture, panels: Sequence[Panel], columns: int, file: Path) -> None:
    from matplotlib.figure import Figure
    from PIL import Image

    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(columns * _WIDTH * picture.width, rows * picture.height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, each in zip(panels, axes, strict=False):
        each.set_title(panel.title)
        picture.draw(each, panel)
    for each in axes[len(panels) :]:
        each.set_visible(False)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=_DPI)
    # A palette takes a third of the room and looks the same.
    with Image.open(drawn) as image:
        palette = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        palette.save(file, optimize=True, dpi=(_DPI, _DPI))


def _importance(axes: Axes, panel: Panel) -> None:
    from pandas import DataFrame

    kinds = panel.importance
    depth = 1 + max(layer for layers in kinds.values() for layer in layers)
    values = DataFrame(kinds).T.reindex(columns=range(depth))
    _heat(axes, values, lambda value: f"{value:.2f}".lstrip("0"), 7 if depth <= 12 else 5, vmin=0, vmax=1).set_label(
        _acceptance(panel)
    )
    axes.set_xlabel("layer left out")


def _exits(axes: Axes, panel: Panel) -> None:
    from matplotlib.patches import Rectangle
    from pandas import DataFrame

    values = DataFrame(panel.exits).pivot(index="draft_length", columns="layer", values="predicted_speedup")
    size = 6 if len(values.columns) <= 12 else 4.5
    _heat(axes, values, "{:.2f}".format, size, origin="lower").set_label("predicted speed-up")
    for row in panel.exits:
        measured = row.get("measured_speedup_median")
        if measured is not None:
            at = values.columns.get_loc(row["layer"]), values.index.get_loc(row["draft_length"]) - 0.33
            _number(axes.images[0], at, row["predicted_speedup"], f"({measured:.2f})", size - 1.5)
    best, column = np.unravel_index(np.nanargmax(values), values.shape)
    axes.add_patch(Rectangle((column - 0.5, best - 0.5), 1, 1, fill=False, ec=COLOURS[1], lw=2, zorder=5))
    axes.set_xlabel("exit layer (frame: predicted optimum; in brackets: measured)")
    axes.set_ylabel("draft length")


def _heat(axes: Axes, values: DataFrame, shown: Callable[[float], str], size: float, **how: Any) -> Any:
    """Draw a table as colours with its numbers, and return the bar of its colours."""
    image = axes.imshow(values, cmap="viridis", aspect="auto", **how)
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            _number(image, (column, row), value, shown(value), size)
    axes.set_xticks(range(len(values.columns)), list(map(str, values.columns)))
    axes.set_yticks(range(len(values.index)), list(map(str, values.index)))
    axes.spines[:].set_visible(False)
    return axes.figure.colorbar(image, ax=axes)


def _number(image: Any, at: tuple[float, float], value: float, text: str, size: float) -> None:
    """Write on the colour of a value."""
    colour = "white" if image.norm(value) < 0.6 else "black"
    image.axes.text(*at, text, ha="center", va="center", fontsize=size, color=colour)


def _positions(axes: Axes, panel: Panel) -> None:
    confirmed = {row["draft"]: row for row in panel.confirmed}
    for colour, row in zip(COLOURS, panel.longest(_DRAFTS), strict=False):
        share, low, high = _interval(row, "acceptance_by_position")
        at = np.arange(1, 1 + len(share))
        axes.plot(at, share, color=colour, label=_short(row["draft"]), zorder=3)
        axes.fill_between(at, low, high, color=colour, alpha=0.1, lw=0)
        axes.set_xticks(at)
        if row["draft"] in confirmed:
            share, low, high = _interval(confirmed[row["draft"]], "measured_acceptance_by_position")
            _points(axes, at[: len(share)], share, [share - low, high - share], color=colour, fmt="o", capsize=1.5)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted, of those judged")
    axes.set_ylim(0, 1.02)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.18),
        title="lines: estimated, with 95 % intervals; points: measured",
        ncols=3,
        columnspacing=1.0,
        handlelength=1.2,
    )


def _pareto(axes: Axes, panel: Panel) -> None:
    speeds = [row["predicted_speedup"] for row in panel.best]
    for kind in dict.fromkeys(row["kind"] for row in panel.best):
        rows = [row for row in panel.best if row["kind"] == kind]
        dots = axes.scatter(
            [row["c"] for row in rows],
            [row["alpha"] for row in rows],
            c=[row["predicted_speedup"] for row in rows],
            vmin=min(speeds),
            vmax=max(speeds),
            marker=_MARKERS.get(kind, "o"),
            s=14,
            cmap="viridis",
            label=kind,
            edgecolors="none",
            zorder=3,
        )
    front, top = panel.front, panel.best[0]
    axes.step([row["c"] for row in front], [row["alpha"] for row in front], where="post", color="#555555", lw=0.8)
    axes.scatter([top["c"]], [top["alpha"]], s=70, facecolors="none", edgecolors=COLOURS[1], linewidths=1.2, zorder=4)
    axes.annotate(
        f"{_short(top['draft'])}\n{top['predicted_speedup']:.2f}x",
        (top["c"], top["alpha"]),
        xytext=(0.97, 0.04),
        textcoords="axes fraction",
        fontsize=6.5,
        ha="right",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
        arrowprops={"arrowstyle": "-", "color": COLOURS[1], "lw": 0.6},
    )
    axes.set_xlabel("draft cost ratio c")
    axes.set_ylabel(_acceptance(panel))
    axes.legend(loc="upper left", handletextpad=0.1)
    axes.set_ylim(0, 1.05)
    axes.figure.colorbar(dots, ax=axes, label="predicted speed-up")


def _agreement(axes: Axes, panel: Panel) -> None:
    axes.plot([0, 1], [0, 1], color="#999999", lw=0.8, zorder=1)
    for row in panel.confirmed:
        (x, left, right), (y, low, high) = (_interval(row, f"{how}acceptance_rate") for how in ("", "measured_"))
        bars: Any = {"xerr": [[x - left], [right - x]], "fmt": _MARKERS.get(row["kind"], "o")}
        _points(axes, [x], [y], [[y - low], [high - y]], color=COLOURS[0], **bars)
    within = sum(row_agrees(row) for row in panel.confirmed)
    axes.set_title(f"{panel.title}\n{within} of {len(panel.confirmed)} within the 95 % interval")
    axes.set_xlabel("estimated acceptance rate")
    axes.set_ylabel("measured by generation")
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.02)


def row_agrees(row: Row) -> bool:
    """Return whether estimate and measurement of a row differ by no more than their intervals explain."""
    estimated, measured = (Estimate(*_interval(row, f"{how}acceptance_rate")) for how in ("", "measured_"))
    return estimated.agrees_with(measured)


def _tokens(axes: Axes, panel: Panel) -> None:
    """Draw the beginnings of the texts, letter by letter on a grid."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Patch

    drafts = [row["draft"] for row in panel.promising(_DRAFTS)]
    shades = np.ones((_DOWN, _ACROSS, 4))
    for row, line in enumerate(islice(_lines(panel, drafts), _DOWN)):
        for column, (letter, draft) in enumerate(line):
            shades[row, column] = to_rgba(GREY if draft is None else COLOURS[draft], 0.45)
            text = axes.text(column, row, letter, family="monospace", fontsize=5.2, ha="center", va="center")
            # A thousand letters, none of which the layout need look at.
            text.set_in_layout(False)
    axes.imshow(shades, aspect="auto", interpolation="nearest")
    axes.hlines(np.arange(_DOWN) - 0.5, -0.5, _ACROSS - 0.5, color="white", lw=0.8)
    axes.set_axis_off()
    axes.legend(
        [Patch(color=colour, alpha=0.45) for colour in (*COLOURS[: len(drafts)], GREY)],
        [*map(_short, drafts), NONE],
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=2,
        title="cheapest draft that would have been right",
    )


def _lines(panel: Panel, drafts: Sequence[str]) -> Iterator[list[tuple[str, int | None]]]:
    """Break texts into lines of letters, each with the first draft that would have been right; a free line after each.

    Of each text come only its first lines.
    """
    for number, text in enumerate(panel.tokens):
        lines: list[list[tuple[str, int | None]]] = [[]]
        for token, draft in zip(text, panel.cheapest_right(drafts, number), strict=True):
            for letter in printable(token):
                if len(lines[-1]) == _ACROSS or (lines[-1] and lines[-1][-1][0] == LINE_END):
                    lines.append([])
                lines[-1].append((letter, draft))
        yield from (*lines[:_EACH], [])


def printable(token: str) -> str:
    """Return a token with everything visible but spaces."""
    shown = token.replace("\r", "").replace("\t", "    ").replace("\n", LINE_END)
    return "".join(letter if letter.isprintable() else "·" for letter in shown)


def _points(axes: Axes, at: Any, shares: Any, bars: Any, **how: Any) -> None:
    """Draw points with their intervals."""
    axes.errorbar(at, shares, bars, ms=3, elinewidth=0.8, ls="none", zorder=4, **how)


def _interval(row: Row, name: str) -> Any:
    """Return a figure of a row and the ends of its interval, `[3]` or `[3, positions]`; NaN where there is none."""
    return np.array([row[name], row[f"{name}_low"], row[f"{name}_high"]], dtype=float)


def _acceptance(panel: Panel) -> str:
    return "acceptance (1 - TV)" if panel.temperature else "top-1 agreement"


def _short(draft: str) -> str:
    name = re.sub(r"[^:]*[/\\]", "", draft).removeprefix("skip:")  # of files only their names
    name = name.replace("attn=", "a").replace("mlp=", "m").replace("layers=", "l")
    return name if len(name) <= 26 else name[:25] + "…"


@dataclass(frozen=True)
class _Picture:
    """One kind of picture: how to draw a panel, which panels have data for it, and the room each takes.

    Attributes:
        width: in widths of a column.
        height: in inches.
    """

    name: str
    draw: Callable[[Axes, Panel], None]
    has: Callable[[Panel], object]
    width: float
    height: float


_PICTURES = (
    _Picture("importance", _importance, lambda panel: panel.importance, 1.35, 1.7),
    _Picture("acceptance_by_position", _positions, lambda panel: panel.best, 1.0, 3.3),
    _Picture("exits", _exits, lambda panel: panel.exits, 1.35, _HEIGHT),
    _Picture("pareto", _pareto, lambda panel: panel.best, 1.1, _HEIGHT),
    _Picture("agreement", _agreement, lambda panel: panel.confirmed, 0.95, _HEIGHT),
    _Picture("tokens", _tokens, lambda panel: panel.best, 1.35, 2.7),
)
