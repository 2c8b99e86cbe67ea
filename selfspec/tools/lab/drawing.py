"""Drawing, once for all tools: panels of one figure, at most a page, as PNG and as SVG."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from selfspec.files.writing import whole
from selfspec.measure.estimate import Estimate
from selfspec.measure.palette import GREY, PALE, STYLE, Mark
from selfspec.tools.lab.report import KEPT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches: of a page within its margins.
_WIDTH, _HEIGHT = 7.2, 9.2
_DPI = 150
# Letters of a note in an inch; columns of a heat map that have room for a number each.
_NOTE_LETTERS, _LABELLED = 20, 17
_STYLE: dict[Any, Any] = {**STYLE, "svg.fonttype": "none", "svg.hashsalt": "selfspec"}


@dataclass(frozen=True)
class Panel:
    """One panel of a picture: its title, and what draws it."""

    title: str
    draw: Callable[[Axes], None]


@dataclass(frozen=True)
class Picture:
    """A picture.

    Attributes:
        name: of its files.
        height: of a panel, in inches.
        across: panels side by side, at most.
        note: text below all panels.
        legend: marks by what they mean.
        share: whether all panels have the same axes.
        finish: draws what all panels share.
    """

    name: str
    panels: Sequence[Panel]
    height: float
    across: int = 2
    note: str = ""
    legend: Mapping[str, Mark] = field(default_factory=dict)
    share: bool = True
    finish: Callable[[Figure, Sequence[Axes]], None] | None = None

    def save(self, folder: Path) -> Path:
        """Draw it, and return the PNG file.

        Raises:
            StorageError: it cannot be written.
        """
        from matplotlib import rc_context

        with rc_context(_STYLE):
            figure = self.figure()
            for suffix in (".svg", ".png"):
                with whole(folder / f"{self.name}{suffix}", KEPT) as draft:
                    figure.savefig(draft, dpi=_DPI, metadata={"Date": None} if suffix == ".svg" else None)
        return folder / f"{self.name}.png"

    def figure(self) -> Figure:
        """Draw it, within matplotlib's present style."""
        # Not pyplot: it keeps global state, and asks for a display.
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D

        across = min(self.across, len(self.panels))
        down = -(-len(self.panels) // across)
        # Room for notes and legend, also where there are few panels.
        height = min(0.8 + self.height * down + 0.15 * (-(-len(self.legend) // 3)), _HEIGHT)
        figure = Figure((_WIDTH, height), layout="constrained")
        grid: list[Axes] = list(figure.subplots(down, across, squeeze=False, sharex=self.share, sharey=self.share).flat)
        for panel, axes in zip(self.panels, grid, strict=False):
            axes.set_title(panel.title)
            panel.draw(axes)
        shown, empty = grid[: len(self.panels)], grid[len(self.panels) :]
        for axes in empty:
            axes.set_axis_off()
        if self.share:
            for axes in shown:
                axes.label_outer()
        if self.finish:
            self.finish(figure, shown)
        figure.supxlabel(textwrap.fill(self.note, int(_NOTE_LETTERS * _WIDTH)), fontsize=6.5)
        if self.legend:
            keys = [Line2D([], [], label=name, lw=1, **mark.of_line) for name, mark in self.legend.items()]
            figure.legend(handles=keys, loc="outside upper center", ncols=min(3, len(keys)))
        return figure


def dots(axes: Axes, lines: Mapping[str, Estimate | None], marks: Mapping[str, Mark], baseline: float) -> None:
    """Draw a figure of each name as a dot on a line of its own, with its interval."""
    for line, (name, found) in enumerate(lines.items()):
        if found is not None:
            ends = [[found.value - found.low], [found.high - found.value]]
            how = {**marks[name].of_line, "linestyle": ""}
            axes.errorbar(found.value, line, xerr=ends, capsize=2, elinewidth=0.8, capthick=0.8, **how)
    axes.axvline(baseline, color=PALE, linewidth=0.9, zorder=0)
    axes.set_yticks(range(len(lines)), list(lines))
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def curves(axes: Axes, shares: Mapping[str, Sequence[Estimate]], marks: Mapping[str, Mark]) -> None:
    """Draw shares of each name by depth, from 1 on, side by side so that intervals can be told apart."""
    longest = max(map(len, shares.values()), default=0)
    for number, (name, known) in enumerate(shares.items()):
        if known:
            at = np.arange(1, len(known) + 1) + 0.4 * ((number + 0.5) / len(shares) - 0.5)
            interval(axes, at.tolist(), known, marks[name], 1.0)
    if not longest:
        axes.text(0.5, 0.5, "too few tokens", ha="center", va="center", transform=axes.transAxes, color=GREY)
    axes.set(ylim=(0, 1.05), xlim=(0.5, max(longest, axes.get_xlim()[1] - 0.5) + 0.5))
    axes.set_xticks(range(1, int(axes.get_xlim()[1]) + 1))
    axes.grid(axis="y")


def interval(axes: Axes, at: Sequence[float], known: Sequence[Estimate], mark: Mark, width: float) -> None:
    """Draw estimates with their intervals, joined by lines of a width, of none if that is 0."""
    ends = [[each.value - each.low for each in known], [each.high - each.value for each in known]]
    how = mark.of_line if width else {**mark.of_line, "linestyle": ""}
    axes.errorbar(at, [each.value for each in known], ends, lw=width, elinewidth=0.6, **how)


def by_layer(
    axes: Axes, lines: Mapping[str, Mapping[int, Estimate]], marks: Mapping[str, Mark], label: str, most: float
) -> None:
    """Draw figures of each layer as lines, their intervals shaded, from 0 to a little above `most`."""
    for name, layers in lines.items():
        at, known = sorted(layers), [layers[layer] for layer in sorted(layers)]
        mark = marks[name]
        size = 2.5 if len(at) <= 40 else 1.5
        axes.plot(at, [each.value for each in known], lw=0.9, ms=size, zorder=3, **mark.of_line)
        axes.fill_between(
            at, [each.low for each in known], [each.high for each in known], color=mark.colour, alpha=0.12, lw=0
        )
    every = sorted({layer for layers in lines.values() for layer in layers})
    axes.set_xticks(every if len(every) <= _LABELLED else [layer for layer in every if layer % 5 == 0])
    axes.set(ylim=(0, 1.08 * most), ylabel=label, xlim=(every[0] - 0.5, every[-1] + 0.5))
    axes.grid(axis="both")


def heat(axes: Axes, values: NDArray[np.float64], rows: Sequence[str], columns: Sequence[str], digits: str) -> None:
    """Draw a table as colours, with its numbers where they have room; `one_scale` gives the colours their meaning."""
    axes.imshow(values, cmap="cividis", aspect="auto")
    if len(columns) <= _LABELLED:
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                axes.text(column, row, format(value, digits), ha="center", va="center", fontsize=5.5)
    every = 1 if len(columns) <= _LABELLED else 5
    axes.set_xticks(range(0, len(columns), every), columns[::every])
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)


def one_scale(figure: Figure, grid: Sequence[Axes], label: str, low: float, high: float) -> None:
    """Give all heat maps of a figure the same colours for the same figures, and one key to them."""
    for axes in grid:
        image = axes.get_images()[0]
        image.set_clim(low, high)
        values: Any = image.get_array()
        for text in axes.texts:
            column, row = text.get_position()
            text.set_color("white" if values[int(row), int(column)] < low + 0.55 * (high - low) else "black")
    figure.colorbar(image, ax=list(grid), label=label, aspect=30, fraction=0.04)
