"""The pictures of a study, drawn with matplotlib for print."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec.files.writing import whole
from selfspec.measure.estimate import Estimate
from selfspec.model.layer_path import Part, Sublayer
from selfspec.tools.studies.report.files import KEPT
from selfspec.tools.studies.report.panels import Panel, cheapest_right
from selfspec.tools.studies.table import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    """Draw every picture that the study has data for.

    Args:
        panels: of the study.
        folder: to write PNG files into.

    Returns:
        The files.
    """
    import matplotlib

    drawn = []
    # As many panels side by side as there are temperatures.
    across = max(1, min(3, len({panel.temperature for panel in panels})))
    for picture in _PICTURES:
        shown = [panel for panel in panels if picture.has(panel)]
        if shown:
            with matplotlib.rc_context(_STYLE):
                drawn.append(_drawn(picture, shown, min(across, len(shown)), folder))
    return drawn


def _drawn(picture: _Picture, panels: Sequence[Panel], columns: int, folder: Path) -> Path:
    from matplotlib.figure import Figure

    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(columns * _WIDTH * picture.width, rows * picture.height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, each in zip(panels, axes, strict=False):
        each.set_title(panel.title)
        picture.draw(each, panel)
    for each in axes[len(panels) :]:
        each.set_visible(False)
    file = folder / f"{picture.name}.png"
    _save(figure, file)
    return file


def _save(figure: Figure, file: Path) -> None:
    """Write a picture with a palette, which takes a third of the room and looks the same."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=_DPI)
    with Image.open(drawn) as image, whole(file, KEPT) as draft:
        palette = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        palette.save(draft, optimize=True, dpi=(_DPI, _DPI))


def _importance(axes: Axes, panel: Panel) -> None:
    single, layers = panel.single, panel.whole_layers
    depth = 1 + max([each.layer for each in single] + list(layers))
    kinds: dict[str, list[float | None]] = {}
    if single:
        for part, name in ((Part.ATTENTION, "attention"), (Part.MLP, "MLP")):
            kinds[name] = [single.get(Sublayer(layer, part)) for layer in range(depth)]
    if layers:
        kinds["both"] = [layers.get(layer) for layer in range(depth)]
    values = np.array(list(kinds.values()), dtype=float)
    image = axes.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for (row, layer), value in np.ndenumerate(values):
        if not np.isnan(value):
            _number(axes, layer, row, f"{value:.2f}".lstrip("0"), value < 0.6, 7 if depth <= 12 else 5)
    axes.set_xticks(range(depth))
    axes.set_yticks(range(len(kinds)), list(kinds))
    axes.set_xlabel("layer left out")
    axes.spines[:].set_visible(False)
    axes.figure.colorbar(image, ax=axes, label=_acceptance(panel))


def _positions(axes: Axes, panel: Panel) -> None:
    confirmed = {row["draft"]: row for row in panel.confirmed}
    for colour, row in zip(COLOURS, panel.longest(_DRAFTS), strict=False):
        shares = _by_position(row, "acceptance_by_position")
        at = list(shares)
        axes.plot(at, [each.value for each in shares.values()], color=colour, label=_short(row["draft"]), zorder=3)
        low, high = [each.low for each in shares.values()], [each.high for each in shares.values()]
        axes.fill_between(at, low, high, color=colour, alpha=0.1, lw=0)
        measured = _by_position(confirmed.get(row["draft"], {}), "measured_acceptance_by_position")
        _with_bars(axes, list(measured), list(measured.values()), color=colour, fmt="o", capsize=1.5)
        axes.set_xticks(range(1, 1 + len(row["acceptance_by_position"])))
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


def _exits(axes: Axes, panel: Panel) -> None:
    from matplotlib.patches import Rectangle

    exits = panel.exits
    layers, lengths = sorted({layer for layer, _ in exits}), sorted({length for _, length in exits})
    values = np.array([[exits[layer, length]["predicted_speedup"] for layer in layers] for length in lengths])
    image = axes.imshow(values, cmap="viridis", aspect="auto", origin="lower")
    size = 6 if len(layers) <= 12 else 4.5
    for (row, column), value in np.ndenumerate(values):
        dark = value < (values.min() + values.max()) / 2
        _number(axes, column, row, f"{value:.2f}", dark, size)
        measured = exits[layers[column], lengths[row]].get("measured_speedup_median")
        if measured is not None:
            _number(axes, column, row - 0.33, f"({measured:.2f})", dark, size - 1.5)
    row, column = np.unravel_index(int(values.argmax()), values.shape)
    axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, ec=COLOURS[1], lw=2, zorder=5))
    axes.set_xticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set_yticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_xlabel("exit layer (frame: predicted optimum; in brackets: measured)")
    axes.set_ylabel("draft length")
    axes.spines[:].set_visible(False)
    axes.figure.colorbar(image, ax=axes, label="predicted speed-up")


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
    front = panel.front
    axes.step([row["c"] for row in front], [row["alpha"] for row in front], where="post", color="#555555", lw=0.8)
    top = max(panel.best, key=lambda row: row["predicted_speedup"])
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
        estimated, measured = _estimate(row, "acceptance_rate"), _estimate(row, "measured_acceptance_rate")
        across = [[estimated.value - estimated.low], [estimated.high - estimated.value]]
        marker = _MARKERS.get(row["kind"], "o")
        _with_bars(axes, [estimated.value], [measured], xerr=across, color=COLOURS[0], fmt=marker)
    within = sum(row_agrees(row) for row in panel.confirmed)
    axes.set_title(f"{panel.title}\n{within} of {len(panel.confirmed)} within the 95 % interval")
    axes.set_xlabel("estimated acceptance rate")
    axes.set_ylabel("measured by generation")
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.02)


def row_agrees(row: Row) -> bool:
    """Return whether estimate and measurement of a row differ by no more than their intervals explain."""
    return _estimate(row, "acceptance_rate").agrees_with(_estimate(row, "measured_acceptance_rate"))


def _tokens(axes: Axes, panel: Panel) -> None:
    """Draw the beginnings of the texts, letter by letter on a grid."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch, Rectangle

    drafts = [row["draft"] for row in panel.promising(_DRAFTS)]
    cells = list(_cells(panel, drafts))
    boxes = [Rectangle((cell.column, cell.row), 1, 0.94) for cell in cells]
    shades = [GREY if cell.draft is None else COLOURS[cell.draft] for cell in cells]
    axes.add_collection(PatchCollection(boxes, facecolors=shades, edgecolors="none", alpha=0.45))
    for cell in cells:
        if not cell.letter.isspace():
            at = cell.column + 0.5, cell.row + 0.5
            letter = axes.text(*at, cell.letter, family="monospace", fontsize=5.2, ha="center", va="center")
            # A thousand letters, none of which the layout need look at.
            letter.set_in_layout(False)
    axes.set_xlim(0, _ACROSS)
    axes.set_ylim(_DOWN, 0)
    axes.set_axis_off()
    axes.legend(
        [Patch(color=colour, alpha=0.45) for colour in (*COLOURS[: len(drafts)], GREY)],
        [*drafts, NONE],
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=2,
        title="cheapest draft that would have been right",
    )


@dataclass(frozen=True)
class _Cell:
    """One letter on the grid, and the draft that would have been right, if any."""

    column: int
    row: int
    letter: str
    draft: int | None


def _cells(panel: Panel, drafts: Sequence[str]) -> Iterator[_Cell]:
    """Place the texts one below the other, as many as there is room for."""
    top = 0
    for number, text in enumerate(panel.tokens):
        column, row = 0, top
        for token, draft in zip(text, cheapest_right(panel, drafts, number), strict=True):
            for letter in printable(token):
                if column == _ACROSS:
                    column, row = 0, row + 1
                if row < min(_DOWN, top + _EACH):
                    yield _Cell(column, row, letter, draft)
                column, row = (0, row + 1) if letter == LINE_END else (column + 1, row)
        # A line stays free between texts.
        top = min(row + bool(column), top + _EACH) + 1


def printable(token: str) -> str:
    """Return a token with everything visible but spaces."""
    shown = token.replace("\r", "").replace("\t", "    ").replace("\n", LINE_END)
    return "".join(letter if letter.isprintable() else "·" for letter in shown)


def _number(axes: Axes, column: float, row: float, text: str, dark: bool, size: float) -> None:
    axes.text(column, row, text, ha="center", va="center", fontsize=size, color="white" if dark else "black")


def _with_bars(axes: Axes, at: Sequence[float], shares: Sequence[Estimate], **how: Any) -> None:
    """Draw points with their intervals."""
    bars = [[each.value - each.low for each in shares], [each.high - each.value for each in shares]]
    axes.errorbar(at, [each.value for each in shares], bars, ms=3, elinewidth=0.8, ls="none", zorder=4, **how)


def _estimate(row: Row, name: str) -> Estimate:
    return Estimate(row[name], row[f"{name}_low"], row[f"{name}_high"])


def _by_position(row: Row, name: str) -> dict[int, Estimate]:
    """Return a share of a row by the position in the draft, from 1 on, where there is one."""
    ends = zip(row.get(name, []), row.get(f"{name}_low", []), row.get(f"{name}_high", []), strict=True)
    return {at: Estimate(*each) for at, each in enumerate(ends, 1) if each[0] is not None}


def _acceptance(panel: Panel) -> str:
    return "acceptance (1 - TV)" if panel.temperature else "top-1 agreement"


def _short(draft: str) -> str:
    name = draft.removeprefix("skip:").replace("attn=", "a").replace("mlp=", "m").replace("layers=", "l")
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
    has: Callable[[Panel], bool]
    width: float
    height: float


_PICTURES = (
    _Picture("importance", _importance, lambda panel: bool(panel.single or panel.whole_layers), 1.35, 1.7),
    _Picture("acceptance_by_position", _positions, lambda panel: bool(panel.best), 1.0, 3.3),
    _Picture("exits", _exits, lambda panel: bool(panel.exits), 1.35, _HEIGHT),
    _Picture("pareto", _pareto, lambda panel: bool(panel.best), 1.1, _HEIGHT),
    _Picture("agreement", _agreement, lambda panel: bool(panel.confirmed), 0.95, _HEIGHT),
    _Picture("tokens", _tokens, lambda panel: bool(panel.best), 1.35, 2.7),
)
