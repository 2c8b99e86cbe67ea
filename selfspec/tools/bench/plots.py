"""The pictures of a benchmark, made from its results: speed by arm, and acceptance by depth, at most a page each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec.errors import BenchError
from selfspec.files.writing import whole
from selfspec.measure.estimate import Estimate
from selfspec.measure.palette import GREY, PALE, STYLE, Mark, mark_of, marks_of
from selfspec.tools.bench.arms import ArmSpec
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.record import Record
from selfspec.tools.bench.results import MeasuredCell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEPT = "the results are kept: make room and repeat the command"
"""What messages say of a report that cannot be written."""

SPEED, ACCEPTANCE = "speed.png", "acceptance.png"

# Of fewer draft tokens a share says little.
_ENOUGH = 10
# Inches: of a page within its margins, and of a line.
_WIDTH, _HEIGHT, _LINE = 7.2, 9.2, 0.2
# More places of measurement than these are lines of one panel, and more arms than these are columns of a heat map.
_FEW_PLACES, _FEW_ARMS = 2, 5
_DPI = 150
_SPEED_LABEL = "decoding speed, times that of model.generate"
_RATE_LABEL = "acceptance rate, with 95 % intervals"
_PLACE_LABEL = "workload,\nrows x tokens of prompt"


@dataclass(frozen=True)
class _Grid:
    """A figure of every arm at every place of measurement and temperature.

    A place is a workload, a batch size and a prompt length. `nothing` is written where no arm has the figure.
    """

    cells: dict[tuple[str, float], MeasuredCell]
    places: list[str]
    temperatures: list[float]
    arms: dict[str, ArmSpec]
    value: Callable[[MeasuredCell, ArmSpec], Estimate | None]
    label: str
    nothing: str

    @classmethod
    def of(
        cls,
        cells: Sequence[MeasuredCell],
        value: Callable[[MeasuredCell, ArmSpec], Estimate | None],
        wanted: Callable[[ArmSpec], bool],
        label: str,
        nothing: str,
    ) -> _Grid:
        """All arms that are wanted and have a value somewhere, in the order of the report."""
        several = len({(each.cell.batch, each.cell.context) for each in cells}) > 1
        at = {(_place(each.cell, several), each.cell.temperature): each for each in cells}
        arms = {record.arm.name: record.arm for each in cells for record in each.arms if wanted(record.arm)}
        known = {name: arm for name, arm in arms.items() if any(value(each, arm) for each in cells)}
        places, temperatures = list(dict.fromkeys(place for place, _ in at)), sorted({t for _, t in at})
        return cls(at, places, temperatures, known, value, label, nothing)

    @property
    def highest(self) -> float:
        """What an axis has to reach: a little more than the end of any interval."""
        return 1.04 * max(found.high for each in self.cells.values() for found in self._found(each))

    def _found(self, measured: MeasuredCell) -> list[Estimate]:
        values = (self.value(measured, arm) for arm in self.arms.values())
        return [found for found in values if found is not None]

    def estimate(self, place: str, temperature: float, arm: str) -> Estimate | None:
        """The figure of an arm in a cell; None where there is none."""
        measured = self.cells.get((place, temperature))
        return None if measured is None else self.value(measured, self.arms[arm])


def require_packages() -> None:
    """Refuse before work starts what could not be drawn."""
    if find_spec("matplotlib") is None:
        raise BenchError("the plots of a benchmark need matplotlib; pip install 'selfspec[bench]', or give --no-plots")


def draw(cells: Sequence[MeasuredCell], folder: Path) -> list[str]:
    """Draw what there are results for, of at least one cell; return the names of the files."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        drawn = {SPEED: _speed(cells), ACCEPTANCE: _acceptance(cells)}
        for name, figure in drawn.items():
            if figure is None:
                (folder / name).unlink(missing_ok=True)
                continue
            with whole(folder / name, KEPT) as draft:
                figure.savefig(draft, dpi=_DPI)
    return [name for name, figure in drawn.items() if figure is not None]


def mark_of_arm(arm: ArmSpec) -> Mark:
    """How an arm is drawn: what is not selfspec's in grey, with a marker for each of its ways."""
    if arm.own:
        return mark_of(arm.draft)
    markers = {"generate": "o", "static": "s", "lookup": "v", "early-exit": "<", "assistant": "X"}
    return Mark(GREY, markers[arm.kind], filled=arm.kind == "generate")


def _speed(cells: Sequence[MeasuredCell]) -> Figure:
    def speed(measured: MeasuredCell, arm: ArmSpec) -> Estimate | None:
        found = measured.figures.get(arm)
        return None if found is None else found.decoding_against.get("model_generate")

    grid = _Grid.of(cells, speed, lambda arm: True, _SPEED_LABEL, "not measured")
    if len(grid.places) > _FEW_PLACES:
        # It is 1 in each line.
        grid.arms.pop("model.generate", None)
    return _figure_of(grid, baseline=1.0)


def _acceptance(cells: Sequence[MeasuredCell]) -> Figure | None:
    drafting = [each for each in cells if any(map(_judged, each.arms))]
    if not drafting:
        return None
    if len(drafting) <= 2 * _FEW_PLACES:
        return _by_depth(drafting)

    def rate(measured: MeasuredCell, arm: ArmSpec) -> Estimate | None:
        counts = next((record.counts for record in measured.arms if record.arm == arm and _judged(record)), None)
        return None if counts is None or counts.judged < _ENOUGH else Estimate.of_share(counts.accepted, counts.judged)

    grid = _Grid.of(drafting, rate, lambda arm: arm.own and arm.draft is not None, _RATE_LABEL, "too few tokens")
    return _figure_of(grid, limit=1.0) if grid.arms else None


def _judged(record: Record) -> bool:
    return bool(record.scored and record.counts and record.counts.judged_per_depth)


def _figure_of(grid: _Grid, baseline: float | None = None, limit: float | None = None) -> Figure:
    """A line for each arm where there are few places; else one for each place, with the arms by colour or column."""
    if len(grid.places) <= _FEW_PLACES:
        return _dots_by_arm(grid, baseline, limit)
    if len(grid.arms) <= _FEW_ARMS:
        return _dots_by_place(grid, baseline, limit)
    return _heat(grid)


def _dots_by_arm(grid: _Grid, baseline: float | None, limit: float | None) -> Figure:
    names = list(grid.arms)
    height = (0.55 + _LINE * len(names)) * len(grid.places) + 0.3
    figure, panels = _panels(len(grid.places), len(grid.temperatures), height)
    for row, place in enumerate(grid.places):
        for column, temperature in enumerate(grid.temperatures):
            panel = panels[row][column]
            for line, name in enumerate(names):
                found = grid.estimate(place, temperature, name)
                if found is not None:
                    _dot(panel, found, line, mark_of_arm(grid.arms[name]))
            panel.set_title(_title(temperature) if len(grid.places) == 1 else f"{place}, {_title(temperature)}")
            panel.set_yticks(range(len(names)), names)
            _finish(panel, len(names), baseline)
    panels[0][0].set_xlim(0, grid.highest if limit is None else limit)
    figure.supxlabel(grid.label, fontsize=STYLE["font.size"])
    return figure


def _dots_by_place(grid: _Grid, baseline: float | None, limit: float | None) -> Figure:
    from matplotlib.lines import Line2D

    names, count = list(grid.arms), len(grid.places)
    # Room for the label of the places, also where there are few.
    height = min(_HEIGHT, 1.1 + max(1.5, count * max(_LINE, 0.075 * len(names))))
    figure, panels = _panels(1, len(grid.temperatures), height)
    for column, temperature in enumerate(grid.temperatures):
        panel = panels[0][column]
        for line, place in enumerate(grid.places):
            for number, name in enumerate(names):
                found = grid.estimate(place, temperature, name)
                if found is not None:
                    # Side by side within four fifths of the line.
                    beside = 0.8 * ((number + 0.5) / len(names) - 0.5)
                    _dot(panel, found, line + beside, mark_of_arm(grid.arms[name]))
            if not any(grid.estimate(place, temperature, name) for name in names):
                panel.text(0.02, line, grid.nothing, va="center", color=GREY, transform=panel.get_yaxis_transform())
            if line % 2:
                panel.axhspan(line - 0.5, line + 0.5, color="#F4F4F4", zorder=0)
        panel.set_title(_title(temperature))
        panel.set_yticks(range(count), grid.places)
        _finish(panel, count, baseline)
    panels[0][0].set_xlim(0, grid.highest if limit is None else limit)
    panels[0][0].set_ylabel(_PLACE_LABEL)
    lines = [
        Line2D([], [], label=name, **{**mark_of_arm(arm).of_line, "linestyle": ""}) for name, arm in grid.arms.items()
    ]
    figure.legend(handles=lines, loc="outside upper center", ncols=min(3, len(lines)))
    figure.supxlabel(grid.label, fontsize=STYLE["font.size"])
    return figure


def _heat(grid: _Grid) -> Figure:
    names, count = list(grid.arms), len(grid.places)
    values = {
        temperature: np.array(
            [[_value(grid.estimate(place, temperature, name)) for name in names] for place in grid.places], float
        )
        for temperature in grid.temperatures
    }
    highest = float(np.nanmax(np.stack([*values.values()])))
    figure, panels = _panels(1, len(grid.temperatures), min(_HEIGHT, 2.2 + _LINE * count))
    for column, temperature in enumerate(grid.temperatures):
        panel = panels[0][column]
        image: Any = panel.imshow(values[temperature], cmap="cividis", aspect="auto", vmin=0, vmax=highest)
        size = 6 if len(names) * len(grid.temperatures) <= 16 else 4.5
        for (row, place), value in np.ndenumerate(values[temperature]):
            shown, colour = ("-", "black") if np.isnan(value) else (f"{value:.2f}", _on(value / highest))
            panel.text(place, row, shown, ha="center", va="center", fontsize=size, color=colour)
        panel.set_title(_title(temperature))
        panel.set_xticks(range(len(names)), names, rotation=90)
        panel.set_yticks(range(count), grid.places)
    panels[0][0].set_ylabel(_PLACE_LABEL)
    figure.colorbar(image, ax=list(panels[0]), label=grid.label, shrink=0.6)
    return figure


def _by_depth(cells: Sequence[MeasuredCell]) -> Figure:
    several = len({(each.cell.batch, each.cell.context) for each in cells}) > 1
    records = [[record for record in each.arms if _judged(record)] for each in cells]
    arms = {record.arm.name: record.arm for each in records for record in each}
    marks = dict(zip(arms, _marks(list(arms.values())), strict=True))
    across = min(2, len(cells))
    down = -(-len(cells) // across)
    figure, panels = _panels(down, across, 2.4 * down + 0.5)
    flat = [panel for row in panels for panel in row]
    for panel in flat[len(cells) :]:
        panel.set_axis_off()
    longest = 1
    for panel, measured, here in zip(flat, cells, records, strict=False):
        for record in here:
            known = _shares(record)
            longest = max(longest, len(known))
            # Side by side, so that intervals can be told apart.
            beside = 0.5 * ((list(arms).index(record.arm.name) + 0.5) / len(arms) - 0.5)
            at = [depth + beside for depth in range(1, len(known) + 1)]
            _curve(panel, at, known, marks[record.arm.name])
        if not panel.get_lines():
            panel.text(0.5, 0.5, "too few tokens", ha="center", va="center", transform=panel.transAxes, color=GREY)
        panel.set_title(f"{_place(measured.cell, several)}, {_title(measured.cell.temperature)}")
        panel.set_ylim(0, 1.05)
        panel.grid(axis="y")
    # All panels share it.
    flat[0].set_xticks(range(1, longest + 1))
    flat[0].set_xlim(0.5, longest + 0.5)
    for row in panels:
        row[0].set_ylabel("share accepted of those judged")
    figure.supxlabel(f"depth in the draft, where at least {_ENOUGH} were judged; 95 % intervals", fontsize=8)
    handles = [_key(name, mark) for name, mark in marks.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(3, len(handles)))
    return figure


def _shares(record: Record) -> list[Estimate]:
    """The share accepted at each depth, up to the first at which too few tokens were judged."""
    assert record.counts is not None
    pairs = zip(record.counts.accepted_per_depth, record.counts.judged_per_depth, strict=True)
    shares = [Estimate.of_share(*pair) for pair in takewhile(lambda pair: pair[1] >= _ENOUGH, pairs)]
    return [share for share in shares if share is not None]


def _curve(panel: Axes, at: Sequence[float], shares: Sequence[Estimate], mark: Mark) -> None:
    if shares:
        values = [share.value for share in shares]
        ends = [[each.value - each.low for each in shares], [each.high - each.value for each in shares]]
        panel.errorbar(at, values, ends, lw=1, elinewidth=0.6, **mark.of_line)


def _key(name: str, mark: Mark) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=name, lw=1, **mark.of_line)


def _marks(arms: Sequence[ArmSpec]) -> list[Mark]:
    """Marks of drafting arms in one picture: one draft of several lengths or rules is told apart by dashes."""
    return list(marks_of([f"{arm.draft}\n{number}" for number, arm in enumerate(arms)]).values())


def _dot(panel: Axes, found: Estimate, line: float, mark: Mark) -> None:
    ends = [[found.value - found.low], [found.high - found.value]]
    how = {**mark.of_line, "linestyle": ""}
    panel.errorbar(found.value, line, xerr=ends, capsize=2, elinewidth=0.8, capthick=0.8, **how)


def _finish(panel: Axes, lines: int, baseline: float | None) -> None:
    if baseline is not None:
        panel.axvline(baseline, color=PALE, linewidth=0.9, zorder=0)
    panel.set_ylim(lines - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x")


def _panels(down: int, across: int, height: float) -> tuple[Figure, list[list[Axes]]]:
    """A figure no larger than a page, whose panels share their axes."""
    # Not pyplot: it keeps global state, and asks for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, min(height, _HEIGHT)), layout="constrained")
    return figure, figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).tolist()


def _place(cell: Cell, several: bool) -> str:
    """Where a cell was measured, but for its temperature; shapes only if there is more than one."""
    return f"{cell.workload}, {cell.batch} x {cell.context}" if several else cell.workload


def _title(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def _value(found: Estimate | None) -> float:
    return float("nan") if found is None else found.value


def _on(share: float) -> str:
    return "white" if share < 0.55 else "black"
