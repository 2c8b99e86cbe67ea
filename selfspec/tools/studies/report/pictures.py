"""The pictures of a study, drawn with matplotlib for print."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec.files.writing import whole
from selfspec.measure.estimate import Estimate
from selfspec.tools.studies.report.files import KEPT
from selfspec.tools.studies.report.panels import Panel
from selfspec.tools.studies.table import SPEEDS, Row, pareto_front

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

# Distinct for colour-blind readers too (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#BBBBBB"
_MARKERS = {"exit": "o", "skip": "s", "skip-file": "D", "head": "^"}
# Inches of a panel and dots per inch; drafts that have a colour each.
_WIDTH, _HEIGHT, _DPI, _DRAFTS = 3.5, 2.9, 300, 5
# Names may hold dollar signs.
_STYLE: dict[Any, Any] = {"font.size": 7, "legend.fontsize": 6, "legend.frameon": False, "text.parse_math": False}


@dataclass(frozen=True)
class _Picture:
    """How to draw a panel, which panels have data for it, and the room each takes: columns, and inches of height."""

    draw: Callable[[Axes, Panel], None]
    has: Callable[[Panel], object]
    width: float
    height: float = _HEIGHT


def draw_all(panels: Sequence[Panel], folder: Path) -> list[Path]:
    """Draw every picture that the study has data for, as PNG files."""
    import matplotlib
    from matplotlib.figure import Figure

    # As many panels side by side as there are temperatures.
    across = min(3, len({panel.temperature for panel in panels}))
    drawn = []
    for name, picture in _PICTURES.items():
        shown = [panel for panel in panels if picture.has(panel)]
        if shown:
            columns = min(across, len(shown))
            rows = -(-len(shown) // columns)
            drawn.append(folder / f"{name}.png")
            with matplotlib.rc_context(_STYLE), whole(drawn[-1], KEPT) as draft:
                figure = Figure((columns * _WIDTH * picture.width, rows * picture.height), layout="constrained")
                for number, panel in enumerate(shown, 1):
                    axes = figure.add_subplot(rows, columns, number, title=panel.title)
                    picture.draw(axes, panel)
                figure.savefig(draft, dpi=_DPI)
    return drawn


def _importance(axes: Axes, panel: Panel) -> None:
    from pandas import DataFrame

    values = DataFrame(panel.importance).T.sort_index(axis="columns")
    _heat(axes, values, values.map("{:.2f}".format), _acceptance(panel), vmin=0, vmax=1)
    axes.set_xlabel("layer left out")


def _exits(axes: Axes, panel: Panel) -> None:
    from matplotlib.patches import Rectangle
    from pandas import DataFrame

    rows = DataFrame(
        {
            "draft_length": row["draft_length"],
            "layer": row["layer"],
            "speedup": row["predicted_speedup"],
            "label": "\n".join(f"{row[name]:.2f}" for name in SPEEDS if row.get(name) is not None),
        }
        for row in panel.exits
    )
    values, labels = (rows.pivot(index="draft_length", columns="layer", values=each) for each in ("speedup", "label"))
    _heat(axes, values, labels, "predicted speed-up", origin="lower")
    best, column = np.unravel_index(np.nanargmax(values), values.shape)
    axes.add_patch(Rectangle((column - 0.5, best - 0.5), 1, 1, fill=False, ec=COLOURS[1], lw=2))
    axes.set(xlabel="exit layer (frame: predicted optimum; below: measured)", ylabel="draft length")


def _heat(axes: Axes, values: DataFrame, labels: DataFrame, what: str, **how: Any) -> None:
    """Draw a table as colours, with its labels on them."""
    image: Any = axes.imshow(values, cmap="viridis", aspect="auto", **how)
    for (row, column), value in np.ndenumerate(values.to_numpy(float)):
        if not np.isnan(value):
            colour = "white" if image.norm(value) < 0.6 else "black"
            axes.text(column, row, labels.iat[row, column], ha="center", va="center", fontsize=5, color=colour)
    axes.set_xticks(range(len(values.columns)), list(map(str, values.columns)))
    axes.set_yticks(range(len(values.index)), list(map(str, values.index)))
    axes.figure.colorbar(image, ax=axes, label=what)


def _positions(axes: Axes, panel: Panel) -> None:
    # The longest draft length shows the most positions.
    longest = {row["draft"]: row for row in panel.rows if row.get("acceptance_by_position")}
    confirmed = {row["draft"]: row for row in panel.confirmed}
    for colour, draft in zip(COLOURS, [row["draft"] for row in panel.promising(_DRAFTS)], strict=False):
        share, low, high = _interval(longest[draft], "acceptance_by_position")
        at = range(1, 1 + len(share))
        axes.plot(at, share, color=colour, label=_short(draft))
        axes.fill_between(at, low, high, color=colour, alpha=0.1, lw=0)
        axes.set_xticks(at)
        if draft in confirmed:
            share, low, high = _interval(confirmed[draft], "measured_acceptance_by_position")
            axes.errorbar(at[: len(share)], share, [share - low, high - share], color=colour, fmt="o", ms=3)
    axes.set(xlabel="position in the draft", ylabel="accepted, of those judged", ylim=(0, 1.02))
    title = "lines: estimated, with 95 % intervals; points: measured"
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), title=title, ncols=3, title_fontsize=6)


def _pareto(axes: Axes, panel: Panel) -> None:
    from matplotlib.colors import Normalize

    norm = Normalize(panel.best[-1]["predicted_speedup"], panel.best[0]["predicted_speedup"])
    for kind in dict.fromkeys(row["kind"] for row in panel.best):
        x, y, speeds = _columns([row for row in panel.best if row["kind"] == kind], "c", "alpha", "predicted_speedup")
        dots = axes.scatter(x, y, 14, speeds, marker=_MARKERS.get(kind, "o"), norm=norm, label=kind, zorder=3)
    axes.step(*_columns(pareto_front(panel.best), "c", "alpha"), where="post", color="#555555", lw=0.8)
    top = panel.best[0]
    axes.annotate(
        f"{_short(top['draft'])}\n{top['predicted_speedup']:.2f}x",
        (top["c"], top["alpha"]),
        xytext=(0.97, 0.04),
        textcoords="axes fraction",
        ha="right",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        arrowprops={"arrowstyle": "->", "color": COLOURS[1]},
    )
    axes.set(xlabel="draft cost ratio c", ylabel=_acceptance(panel), ylim=(0, 1.05))
    axes.legend(loc="upper left")
    axes.figure.colorbar(dots, ax=axes, label="predicted speed-up")


def _agreement(axes: Axes, panel: Panel) -> None:
    axes.axline((0, 0), slope=1, color="#999999", lw=0.8)
    for row in panel.confirmed:
        (x, left, right), (y, low, high) = (_interval(row, f"{how}acceptance_rate") for how in ("", "measured_"))
        marker = _MARKERS.get(row["kind"], "o")
        axes.errorbar(x, y, [[y - low], [high - y]], [[x - left], [right - x]], fmt=marker, ms=3, color=COLOURS[0])
    within = sum(map(row_agrees, panel.confirmed))
    axes.set_title(f"{panel.title}\n{within} of {len(panel.confirmed)} within the 95 % interval")
    axes.set(xlabel="estimated acceptance rate", ylabel="measured by generation", xlim=(0, 1.02), ylim=(0, 1.02))


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


def _acceptance(panel: Panel) -> str:
    return "acceptance (1 - TV)" if panel.temperature else "top-1 agreement"


def _short(draft: str) -> str:
    name = re.sub(r"[^:]*[/\\]", "", draft).removeprefix("skip:")  # of files only their names
    name = name.replace("attn=", "a").replace("mlp=", "m").replace("layers=", "l")
    return name if len(name) <= 26 else name[:25] + "…"


_PICTURES = {
    "importance": _Picture(_importance, lambda panel: panel.importance, 1.35, 1.7),
    "acceptance_by_position": _Picture(_positions, lambda panel: panel.best, 1.0, 3.3),
    "exits": _Picture(_exits, lambda panel: panel.exits, 1.35),
    "pareto": _Picture(_pareto, lambda panel: panel.best, 1.1),
    "agreement": _Picture(_agreement, lambda panel: panel.confirmed, 0.95),
}
