"""The pictures of a study, by matplotlib, fit for print."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec.files.writing import whole
from selfspec.measure.estimate import Estimate
from selfspec.model.layer_path import Part, Sublayer
from selfspec.tools.studies.report.files import KEPT
from selfspec.tools.studies.report.panels import Panel
from selfspec.tools.studies.report.tokens import draw_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinct for colour-blind readers too (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = {"exit": "o", "skip": "s", "skip-file": "D", "head": "^"}
_WIDTH, _HEIGHT, _DPI = 3.5, 2.9, 300
_LINES = 5


def draw_all(panels: Sequence[Panel], folder: Path) -> list[Path]:
    """Draw every picture that the study has data for.

    Args:
        panels: of the study.
        folder: to write PNG files into.

    Returns:
        The files.
    """
    from matplotlib.figure import Figure

    drawn = []
    # As many panels side by side as there are temperatures.
    across = max(1, min(3, len({panel.temperature for panel in panels})))
    for name, draw, has, height, width in _PICTURES:
        shown = [panel for panel in panels if has(panel)]
        if not shown:
            continue
        columns = min(across, len(shown))
        rows = -(-len(shown) // columns)
        with _style():
            figure = Figure(figsize=(columns * _WIDTH * width, rows * height), layout="constrained")
            axes = figure.subplots(rows, columns, squeeze=False)
            for each in axes.flat:
                each.set_visible(False)
            for panel, each in zip(shown, axes.flat, strict=False):
                each.set_visible(True)
                each.set_title(panel.title)
                draw(each, panel)
            _save(figure, folder / f"{name}.png")
        drawn.append(folder / f"{name}.png")
    return drawn


def _save(figure: Figure, file: Path) -> None:
    """Write a picture with a palette of its own, which takes a third of the room and looks the same."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=_DPI)
    with Image.open(drawn) as image:
        palette = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        with whole(file, KEPT) as draft:
            palette.save(draft, optimize=True, dpi=(_DPI, _DPI))


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    settings: Any = {
        "font.size": 8,
        "axes.titlesize": 8.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.fontsize": 6.5,
        "legend.frameon": False,
        "lines.linewidth": 1.2,
        "figure.facecolor": "white",
        # Names may hold dollar signs.
        "text.parse_math": False,
    }
    with matplotlib.rc_context(settings):
        yield


def _importance(axes: Axes, panel: Panel) -> None:
    single, layers = panel.single, panel.whole_layers
    depth = 1 + max([each.layer for each in single] + list(layers))
    kinds: list[tuple[str, Callable[[int], float | None]]] = []
    if single:
        kinds.append(("attention", lambda layer: single.get(Sublayer(layer, Part.ATTENTION))))
        kinds.append(("MLP", lambda layer: single.get(Sublayer(layer, Part.MLP))))
    if layers:
        kinds.append(("both", layers.get))
    values = np.array([[np.nan if (v := of(layer)) is None else v for layer in range(depth)] for _, of in kinds])
    image = axes.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    size = 7 if depth <= 12 else 5
    for (row, layer), value in np.ndenumerate(values):
        if not np.isnan(value):
            shade = "white" if value < 0.6 else "black"
            axes.text(layer, row, f"{value:.2f}".lstrip("0"), ha="center", va="center", color=shade, fontsize=size)
    axes.set_xticks(range(depth))
    axes.set_yticks(range(len(kinds)), [name for name, _ in kinds])
    axes.set_xlabel("layer left out")
    axes.spines[:].set_visible(False)
    axes.figure.colorbar(image, ax=axes, label="acceptance (1 - TV)" if panel.temperature else "top-1 agreement")


def _positions(axes: Axes, panel: Panel) -> None:
    for colour, row in zip(COLOURS, _lines(panel), strict=False):
        shares = row["acceptance_by_position"]
        at = [index + 1 for index, share in enumerate(shares) if share is not None]
        known = [index - 1 for index in at]
        axes.plot(at, [shares[index] for index in known], color=colour, label=_short(row["draft"]), zorder=3)
        low, high = row["acceptance_by_position_low"], row["acceptance_by_position_high"]
        axes.fill_between(
            at, [low[index] for index in known], [high[index] for index in known], color=colour, alpha=0.1, lw=0
        )
        measured = next((each for each in panel.confirmed if each["draft"] == row["draft"]), None)
        if measured is not None:
            _points(axes, measured, colour)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted, of those judged")
    axes.set_ylim(0, 1.02)
    axes.set_xticks(range(1, 1 + max(len(row["acceptance_by_position"]) for row in _lines(panel))))
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.18),
        title="lines: estimated, with 95 % intervals; points: measured",
        title_fontsize=6.5,
        ncols=3,
        columnspacing=1.0,
        handlelength=1.2,
    )


def _points(axes: Axes, row: dict[str, Any], colour: str) -> None:
    for index, share in enumerate(row["measured_acceptance_by_position"]):
        if share is not None:
            low = row["measured_acceptance_by_position_low"][index]
            high = row["measured_acceptance_by_position_high"][index]
            error = [[share - low], [high - share]]
            axes.errorbar(
                index + 1, share, yerror_of(error), fmt="o", ms=3, color=colour, elinewidth=0.8, capsize=1.5, zorder=4
            )


def yerror_of(error: list[list[float]]) -> list[list[float]]:
    """Error bars that rounding made negative are none."""
    return [[max(0.0, each) for each in side] for side in error]


def _lines(panel: Panel) -> list[dict[str, Any]]:
    """The drafts that promise most, at the longest draft length, which shows the most positions."""
    longest = {
        row["draft"]: row for row in panel.rows if row.get("acceptance_by_position") and row.get("c") is not None
    }
    return [longest[row["draft"]] for row in panel.promising(_LINES)]


def _exits(axes: Axes, panel: Panel) -> None:
    exits = panel.exits
    layers, lengths = sorted({layer for layer, _ in exits}), sorted({length for _, length in exits})
    values = np.array([[exits[layer, length]["predicted_speedup"] for layer in layers] for length in lengths])
    image = axes.imshow(values, cmap="viridis", aspect="auto", origin="lower")
    middle = (values.min() + values.max()) / 2
    size = 6 if len(layers) <= 12 else 4.5
    for (row, column), value in np.ndenumerate(values):
        shade = "white" if value < middle else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=size, color=shade)
        measured = exits[layers[column], lengths[row]].get("measured_speedup_median")
        if measured is not None:
            axes.text(
                column, row - 0.33, f"({measured:.2f})", ha="center", va="center", fontsize=size - 1.5, color=shade
            )
    row, column = np.unravel_index(int(values.argmax()), values.shape)
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, ec=COLOURS[1], lw=2, zorder=5))
    axes.set_xticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set_yticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_xlabel("exit layer (frame: predicted optimum; in brackets: measured)")
    axes.set_ylabel("draft length")
    axes.spines[:].set_visible(False)
    axes.figure.colorbar(image, ax=axes, label="predicted speed-up")


def _pareto(axes: Axes, panel: Panel) -> None:
    best = panel.best
    speeds = [row["predicted_speedup"] for row in best]
    for kind, marker in MARKERS.items():
        rows = [row for row in best if row["kind"] == kind]
        if rows:
            dots = axes.scatter(
                [row["c"] for row in rows],
                [row["alpha"] for row in rows],
                c=[row["predicted_speedup"] for row in rows],
                vmin=min(speeds),
                vmax=max(speeds),
                marker=marker,
                s=14,
                cmap="viridis",
                label=kind,
                edgecolors="none",
                zorder=3,
            )
    axes.step(
        [row["c"] for row in panel.front], [row["alpha"] for row in panel.front], where="post", color="#555555", lw=0.8
    )
    top = max(best, key=lambda row: row["predicted_speedup"])
    axes.scatter([top["c"]], [top["alpha"]], s=70, facecolors="none", edgecolors="#D55E00", linewidths=1.2, zorder=4)
    axes.annotate(
        f"{_short(top['draft'])}\n{top['predicted_speedup']:.2f}x",
        (top["c"], top["alpha"]),
        xytext=(0.97, 0.04),
        textcoords="axes fraction",
        fontsize=6.5,
        ha="right",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
        arrowprops={"arrowstyle": "-", "color": "#D55E00", "lw": 0.6},
    )
    axes.set_xlabel("draft cost ratio c")
    axes.set_ylabel("acceptance (1 - TV)" if panel.temperature else "top-1 agreement")
    axes.legend(loc="upper left", handletextpad=0.1)
    axes.set_ylim(0, 1.05)
    axes.figure.colorbar(dots, ax=axes, label="predicted speed-up")


def _agreement(axes: Axes, panel: Panel) -> None:
    axes.plot([0, 1], [0, 1], color="#999999", lw=0.8, zorder=1)
    for row in panel.confirmed:
        x, y = row["acceptance_rate"], row["measured_acceptance_rate"]
        axes.errorbar(
            x,
            y,
            xerr=yerror_of([[x - row["acceptance_rate_low"]], [row["acceptance_rate_high"] - x]]),
            yerr=yerror_of([[y - row["measured_acceptance_rate_low"]], [row["measured_acceptance_rate_high"] - y]]),
            fmt=MARKERS.get(row["kind"], "o"),
            ms=3,
            color=COLOURS[0],
            elinewidth=0.7,
        )
    within = sum(row_agrees(row) for row in panel.confirmed)
    axes.set_title(f"{panel.title}\n{within} of {len(panel.confirmed)} within the 95 % interval")
    axes.set_xlabel("estimated acceptance rate")
    axes.set_ylabel("measured by generation")
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.02)


def row_agrees(row: dict[str, Any]) -> bool:
    """Whether estimate and measurement of a row differ by no more than their intervals explain."""
    estimated, measured = (
        Estimate(row[name], row[f"{name}_low"], row[f"{name}_high"])
        for name in ("acceptance_rate", "measured_acceptance_rate")
    )
    return estimated.agrees_with(measured)


def _tokens(axes: Axes, panel: Panel) -> None:
    draw_tokens(axes, panel, [row["draft"] for row in panel.promising(_LINES)], COLOURS)


def _short(draft: str) -> str:
    name = draft.removeprefix("skip:").replace("attn=", "a").replace("mlp=", "m").replace("layers=", "l")
    return name if len(name) <= 26 else name[:25] + "…"


_PICTURES: tuple[tuple[str, Callable[[Any, Panel], None], Callable[[Panel], bool], float, float], ...] = (
    ("importance", _importance, lambda panel: bool(panel.single or panel.whole_layers), 1.7, 1.35),
    ("acceptance_by_position", _positions, lambda panel: bool(panel.best), 3.3, 1.0),
    ("exits", _exits, lambda panel: bool(panel.exits), _HEIGHT, 1.35),
    ("pareto", _pareto, lambda panel: bool(panel.best), _HEIGHT, 1.1),
    ("agreement", _agreement, lambda panel: bool(panel.confirmed), _HEIGHT, 0.95),
    ("tokens", _tokens, lambda panel: bool(panel.best), 2.7, 1.35),
)
