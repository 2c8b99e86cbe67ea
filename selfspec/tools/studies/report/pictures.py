"""The pictures of a study, drawn with matplotlib for print."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec.files.writing import whole
from selfspec.measure.estimate import Estimate
from selfspec.measure.palette import GREY, PALE, STYLE, VERMILION, mark_of, marks_of
from selfspec.tools.studies.report.files import KEPT
from selfspec.tools.studies.report.panels import Panel
from selfspec.tools.studies.table import SPEEDS, Row, pareto_front

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

# Inches: the width of a column of panels, the height of a panel, and a page within its margins.
_WIDTH, _HEIGHT, _PAGE = 3.6, 2.6, 9.2
# Dots per inch; drafts that have a line each, and labelled drafts of a front.
_DPI, _DRAFTS, _LABELS = 200, 5, 5
# Letters of a note in an inch.
_NOTE_LETTERS = 22
_STYLE: dict[Any, Any] = {**STYLE, "font.size": 7, "axes.titlesize": 7, "legend.fontsize": 6}


@dataclass(frozen=True)
class _Picture:
    """How to draw a panel, which panels have data for it, and the inches of height that each takes.

    Attributes:
        note: text below all panels.
        finish: draws what all panels of the figure share.
        heat: whether panels are heat maps, of which each has its own axes.
    """

    draw: Callable[[Axes, Panel], None]
    has: Callable[[Panel], object]
    height: float = _HEIGHT
    note: str = ""
    finish: Callable[[Figure, Sequence[Axes]], None] | None = None
    heat: bool = False


def draw_all(panels: Sequence[Panel], folder: Path) -> list[Path]:
    """Draw every picture that the study has data for, as PNG files of at most a page."""
    import matplotlib
    from matplotlib.figure import Figure

    # As many panels side by side as there are temperatures, two at most.
    across = min(2, len({panel.temperature for panel in panels}))
    drawn = []
    for name, picture in _PICTURES.items():
        shown = [panel for panel in panels if picture.has(panel)]
        if shown:
            columns = min(across, len(shown))
            rows = -(-len(shown) // columns)
            drawn.append(folder / f"{name}.png")
            with matplotlib.rc_context(_STYLE), whole(drawn[-1], KEPT) as draft:
                height = min(rows * picture.height + 0.3, _PAGE)
                figure = Figure((2 * _WIDTH if columns == 2 else 1.4 * _WIDTH, height), layout="constrained")
                share = not picture.heat
                grid: list[Axes] = list(figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share).flat)
                for panel, axes in zip(shown, grid, strict=False):
                    axes.set_title(panel.title)
                    picture.draw(axes, panel)
                for axes in grid[len(shown) :]:
                    axes.set_axis_off()
                if picture.finish:
                    picture.finish(figure, grid[: len(shown)])
                # A narrow figure has its note in several lines.
                note = textwrap.fill(picture.note, int(_NOTE_LETTERS * figure.get_figwidth()))
                figure.supxlabel(note, fontsize=6)
                if share:
                    for axes in grid:
                        axes.label_outer()
                figure.savefig(draft, dpi=_DPI)
    return drawn


def _importance(axes: Axes, panel: Panel) -> None:
    from pandas import DataFrame

    values = DataFrame(panel.importance).T.sort_index(axis="columns")
    _heat(axes, values, values.map("{:.2f}".format))
    axes.set_xlabel("layer left out")


def _exits(axes: Axes, panel: Panel) -> None:
    from pandas import DataFrame

    rows = DataFrame(
        {
            "draft_length": row["draft_length"],
            "layer": row["layer"],
            "speedup": row["predicted_speedup"],
            "label": _speeds(row),
        }
        for row in panel.exits
    )
    values, labels = (rows.pivot(index="draft_length", columns="layer", values=each) for each in ("speedup", "label"))
    _heat(axes, values, labels, origin="lower")
    axes.set(xlabel="exit layer", ylabel="draft length")


def _speeds(row: Row) -> str:
    """What a draft promises, and below, in brackets, what was measured of it."""
    predicted, measured = (row.get(name) for name in SPEEDS)
    return f"{predicted:.2f}" + ("" if measured is None else f"\n({measured:.2f})")


def _heat(axes: Axes, values: DataFrame, labels: DataFrame, **how: Any) -> None:
    """Draw a table as colours, with its labels on them; `_one_scale` gives the colours of all panels their meaning."""
    axes.imshow(values, cmap="cividis", aspect="auto", **how)
    for (row, column), value in np.ndenumerate(values.to_numpy(float)):
        if not np.isnan(value):
            axes.text(column, row, labels.iat[row, column], ha="center", va="center", fontsize=5)
    axes.set_xticks(range(len(values.columns)), list(map(str, values.columns)))
    axes.set_yticks(range(len(values.index)), list(map(str, values.index)))
    axes.tick_params(length=0)


def _one_scale(figure: Figure, grid: Sequence[Axes], label: str, low: float, high: float) -> None:
    """Give all heat maps of a figure the same colours for the same figures, and one key to them."""
    for axes in grid:
        image = axes.get_images()[0]
        image.set_clim(low, high)
        values: Any = image.get_array()
        for text in axes.texts:
            column, row = text.get_position()
            text.set_color("white" if values[int(row), int(column)] < low + 0.55 * (high - low) else "black")
    figure.colorbar(image, ax=list(grid), label=label, aspect=30, fraction=0.04)


def _finish_importance(figure: Figure, grid: Sequence[Axes]) -> None:
    _one_scale(figure, grid, "acceptance", 0, 1)


def _finish_exits(figure: Figure, grid: Sequence[Axes]) -> None:
    from matplotlib.patches import Rectangle

    every = [np.asarray(axes.get_images()[0].get_array(), float) for axes in grid]
    _one_scale(figure, grid, "predicted speed-up", min(map(np.nanmin, every)), max(map(np.nanmax, every)))
    for axes, values in zip(grid, every, strict=True):
        best, column = np.unravel_index(np.nanargmax(values), values.shape)
        axes.add_patch(Rectangle((column - 0.5, best - 0.5), 1, 1, fill=False, ec=VERMILION, lw=1.5))


def _positions(axes: Axes, panel: Panel) -> None:
    # The longest draft length shows the most positions.
    longest = {row["draft"]: row for row in panel.rows if row.get("acceptance_by_position")}
    confirmed = {row["draft"]: row for row in panel.confirmed}
    drafts = [row["draft"] for row in panel.promising(_DRAFTS) if row["draft"] in longest]
    for number, (draft, mark) in enumerate(marks_of(drafts).items()):
        share, low, high = _interval(longest[draft], "acceptance_by_position")
        at = np.arange(1, 1 + len(share))
        axes.plot(at, share, color=mark.colour, ls=mark.dashes, label=_short(draft), lw=1.1)
        axes.fill_between(at, low, high, color=mark.colour, alpha=0.08, lw=0)
        axes.set_xticks(at)
        if draft in confirmed:
            share, low, high = _interval(confirmed[draft], "measured_acceptance_by_position")
            beside = 0.06 * (number - (len(drafts) - 1) / 2)
            points = {**mark.of_line, "linestyle": ""}
            axes.errorbar(at[: len(share)] + beside, share, [share - low, high - share], ms=3, lw=0.8, **points)
    if not drafts:
        axes.text(0.5, 0.5, "too few tokens", ha="center", va="center", transform=axes.transAxes, color=GREY)
    axes.set(xlabel="position in the draft", ylabel="share accepted of those judged", ylim=(0, 1.02))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3)


def _pareto(axes: Axes, panel: Panel) -> None:
    from matplotlib.patheffects import withStroke

    for kind in dict.fromkeys(row["kind"] for row in panel.best):
        x, y = _columns([row for row in panel.best if row["kind"] == kind], "c", "alpha")
        mark = mark_of(kind)
        axes.scatter(x, y, 9, mark.colour, marker=mark.marker, label=kind, zorder=3, alpha=0.7, lw=0)
    front = pareto_front(panel.best)
    axes.step(*_columns(front, "c", "alpha"), where="post", color=PALE, lw=0.9)
    top = panel.best[0]
    axes.scatter(top["c"], top["alpha"], 60, facecolors="none", edgecolors=VERMILION, lw=1.2, zorder=4)
    # The best first; then those of the front with room for a name, above the front, where no draft is.
    labelled: list[Row] = []
    for row in [top, *front]:
        far = all(abs(row["c"] - each["c"]) > 0.45 or abs(row["alpha"] - each["alpha"]) > 0.05 for each in labelled)
        if far and len(labelled) < _LABELS:
            labelled.append(row)
            text = f"{_short(row['draft'])}  {row['predicted_speedup']:.2f}x"
            right = row["c"] > 0.35
            axes.annotate(
                text,
                (row["c"], row["alpha"]),
                xytext=(-5, 4) if right else (4, 4),
                textcoords="offset points",
                ha="right" if right else "left",
                fontsize=5.5,
                fontweight="bold" if row is top else "normal",
                path_effects=[withStroke(linewidth=1.5, foreground="white")],
                zorder=5,
            )
    axes.set(xlabel="draft cost ratio c", ylabel="acceptance", xlim=(0, 1.05), ylim=(0, 1.08))
    axes.legend(loc="upper left")


def _agreement(axes: Axes, panel: Panel) -> None:
    axes.axline((0, 0), slope=1, color=PALE, lw=0.8)
    for row in panel.confirmed:
        (x, left, right), (y, low, high) = (_interval(row, f"{how}acceptance_rate") for how in ("", "measured_"))
        how = {**mark_of(row["kind"]).of_line, "linestyle": ""}
        known = {line.get_label() for line in axes.containers}
        label = None if row["kind"] in known else row["kind"]
        axes.errorbar(x, y, [[y - low], [high - y]], [[x - left], [right - x]], ms=3, lw=0.8, label=label, **how)
    within = sum(map(row_agrees, panel.confirmed))
    axes.set_title(f"{panel.title}: {within} of {len(panel.confirmed)} within 95 %")
    axes.set(xlabel="estimated acceptance rate", ylabel="acceptance rate, generated", xlim=(0, 1.02), ylim=(0, 1.02))
    axes.set_aspect("equal")
    axes.legend(loc="upper left")


def row_agrees(row: Row) -> bool:
    """Return whether estimate and measurement of a row differ by no more than their intervals explain."""
    estimated, measured = (Estimate(*_interval(row, f"{how}acceptance_rate")) for how in ("", "measured_"))
    return estimated.agrees_with(measured)


def _columns(rows: Sequence[Row], *names: str) -> Any:
    """Return figures of some rows, `[names, rows]`."""
    return np.array([[row[name] for row in rows] for name in names])


def _interval(row: Row, name: str) -> Any:
    """Return a figure of a row and the ends of its interval, `[3]` or `[3, positions]`; NaN where there is none."""
    return np.array([row[name], row[f"{name}_low"], row[f"{name}_high"]], dtype=float)


def _short(draft: str) -> str:
    name = re.sub(r"[^:]*[/\\]", "", draft).removeprefix("skip:")  # of files only their names
    name = name.replace("attn=", "a").replace("mlp=", "m").replace("layers=", "l")
    return name if len(name) <= 26 else name[:25] + "…"


_MEANING = "acceptance: top-1 agreement where greedy, 1 - TV where sampled"
_PICTURES = {
    "importance": _Picture(_importance, lambda panel: panel.importance, 1.3, _MEANING, _finish_importance, heat=True),
    "acceptance_by_position": _Picture(
        _positions, lambda panel: panel.best, note="lines: estimated; points: measured; both with 95 % intervals"
    ),
    "exits": _Picture(
        _exits,
        lambda panel: panel.exits,
        2.2,
        "frame: predicted optimum; in brackets: measured",
        _finish_exits,
        heat=True,
    ),
    "pareto": _Picture(
        _pareto,
        lambda panel: panel.best,
        3.2,
        f"{_MEANING}. Line: no draft is cheaper and better. Circle: highest predicted speed-up",
    ),
    "agreement": _Picture(_agreement, lambda panel: panel.confirmed, 3.3, "both with 95 % intervals"),
}
