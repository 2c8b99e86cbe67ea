"""The pictures of a benchmark: speed by arm, and acceptance by depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from selfspec.measure.estimate import Estimate
from selfspec.measure.palette import GREY, Mark, mark_of, marks_of
from selfspec.tools.lab.arms import ArmSpec
from selfspec.tools.lab.cell import Cell
from selfspec.tools.lab.drawing import Panel, Picture, curves, dots, heat, one_scale
from selfspec.tools.lab.measured import MeasuredCell
from selfspec.tools.lab.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of fewer draft tokens a share says little.
_ENOUGH = 10
# More cells than these are lines of one panel.
_FEW = 4
_LINE = 0.2
_SPEED = "decoding speed, times that of model.generate; medians with their intervals"
_RATE = "acceptance rate: share of the judged draft tokens that were accepted"
_DEPTH = f"depth in the draft, where at least {_ENOUGH} tokens were judged; share accepted of those, 95 % intervals"

_Value = Callable[[MeasuredCell, ArmSpec], Estimate | None]


def draw(cells: Sequence[MeasuredCell], folder: Path) -> list[Path]:
    """Draw what there are results for; return the files."""
    pictures = [_speed([each for each in cells if each.timed]), _acceptance(cells)]
    return [picture.save(folder) for picture in pictures if picture is not None]


def mark_of_arm(arm: ArmSpec) -> Mark:
    """How an arm is drawn: what is not selfspec's in grey, with a marker for each of its ways."""
    if arm.own:
        return mark_of(arm.draft)
    markers = {"generate": "o", "static": "s", "lookup": "v", "early-exit": "<", "assistant": "X"}
    return Mark(GREY, markers[arm.kind], filled=arm.kind == "generate")


def _speed(cells: Sequence[MeasuredCell]) -> Picture | None:
    def speed(measured: MeasuredCell, arm: ArmSpec) -> Estimate | None:
        found = measured.figures.get(arm)
        return None if found is None else found.decoding_against.get("model_generate")

    known = [each for each in cells if any(speed(each, record.arm) for record in each.arms)]
    if not known:
        return None
    if len(known) > _FEW:
        return _heat_map("speed", known, speed, _SPEED)
    arms = {record.arm.name: record.arm for each in known for record in each.arms if speed(each, record.arm)}
    marks = {name: mark_of_arm(arm) for name, arm in arms.items()}
    panels = [
        Panel(
            _title(each.cell),
            partial(dots, lines={name: speed(each, arm) for name, arm in arms.items()}, marks=marks, baseline=1.0),
        )
        for each in known
    ]
    return Picture("speed", panels, 0.5 + _LINE * len(arms), note=_SPEED, finish=_from_zero)


def _from_zero(_: Figure, grid: Sequence[Axes]) -> None:
    grid[0].set_xlim(left=0)


def _acceptance(cells: Sequence[MeasuredCell]) -> Picture | None:
    drafting = [each for each in cells if any(map(_was_judged, each.arms))]
    if not drafting:
        return None
    if len(drafting) > _FEW:

        def rate(measured: MeasuredCell, arm: ArmSpec) -> Estimate | None:
            found = measured.figures.get(arm)
            return found.acceptance_rate if found is not None and arm.draft is not None else None

        return _heat_map("acceptance", drafting, rate, _RATE)
    arms = {record.arm.name: record.arm for each in drafting for record in each.arms if _was_judged(record)}
    # One draft of several lengths or rules is told apart by dashes.
    several = marks_of([f"{arm.draft}\n{number}" for number, arm in enumerate(arms.values())])
    marks = dict(zip(arms, several.values(), strict=True))
    panels = []
    for each in drafting:
        by_arm = {record.arm.name: _shares(record) for record in each.arms if _was_judged(record)}
        shares = {name: by_arm.get(name, []) for name in arms}
        panels.append(Panel(_title(each.cell), partial(curves, shares=shares, marks=marks)))
    return Picture("acceptance", panels, 2.4, note=_DEPTH, legend=marks)


def _heat_map(name: str, cells: Sequence[MeasuredCell], value: _Value, label: str) -> Picture:
    """Arms by column and places by line, with a panel for each temperature."""
    known = {record.arm.name: record.arm for each in cells for record in each.arms if value(each, record.arm)}
    places = list(dict.fromkeys(_place(each.cell) for each in cells))
    tables = {}
    for decoding in dict.fromkeys(each.cell.decoding for each in cells):
        table = np.full((len(places), len(known)), np.nan)
        for each in cells:
            for column, arm in enumerate(known.values()):
                if each.cell.decoding == decoding and (found := value(each, arm)) is not None:
                    table[places.index(_place(each.cell)), column] = found.value
        tables[decoding] = table

    def finish(figure: Figure, grid: Sequence[Axes]) -> None:
        one_scale(figure, grid, name, 0.0, float(max(np.nanmax(table) for table in tables.values())))
        for axes in grid:
            axes.set_xticks(range(len(known)), list(known), rotation=90)

    panels = [
        Panel(decoding, partial(heat, values=table, rows=places, columns=list(known), digits=".2f"))
        for decoding, table in tables.items()
    ]
    return Picture(name, panels, 1.4 + _LINE * len(places), note=label, finish=finish)


def _was_judged(record: Record) -> bool:
    return bool(record.scored and record.counts and record.counts.judged_per_depth)


def _shares(record: Record) -> list[Estimate]:
    """The share accepted at each depth, up to the first at which too few tokens were judged."""
    assert record.counts is not None
    pairs = zip(record.counts.accepted_per_depth, record.counts.judged_per_depth, strict=True)
    shares = [Estimate.of_share(*pair) for pair in takewhile(lambda pair: pair[1] >= _ENOUGH, pairs)]
    return [share for share in shares if share is not None]


def _place(cell: Cell) -> str:
    """Where a cell was measured, but for its temperature."""
    prompts = "whole" if cell.context is None else str(cell.context)
    return f"{cell.workload}, {cell.batch} x {prompts}"


def _title(cell: Cell) -> str:
    return f"{_place(cell)}, {cell.decoding}"
