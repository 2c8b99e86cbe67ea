"""The pictures of a benchmark: speed by arm, and acceptance by depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from selfspec.measure.estimate import Estimate
from selfspec.measure.palette import GREY, Mark, mark_of, told_apart
from selfspec.tools.lab.arms import ArmSpec, short_names
from selfspec.tools.lab.drawing import Panel, Picture, curves, dots, heat, one_scale
from selfspec.tools.lab.measured import MeasuredCell, titles
from selfspec.tools.lab.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of fewer draft tokens a share says little.
_ENOUGH = 10
# More cells than these are columns of one panel; arms that have a line each.
_FEW, _LINES = 6, 6
_LINE = 0.2
_SPEED = "decoding speed, times that of model.generate; medians with their intervals"
_TOKENS = "tokens committed by a target pass, with 95 % intervals over prompts; grey: plain decoding"
_RATE = "acceptance rate: share of the judged draft tokens that were accepted, with 95 % intervals over prompts"
_DEPTH = f"depth in the draft, where at least {_ENOUGH} tokens were judged; share accepted of those, 95 % intervals"

_Value = Callable[[MeasuredCell, ArmSpec], Estimate | None]


def draw(cells: Sequence[MeasuredCell], folder: Path) -> list[Path]:
    """Draw what there are results for; return the files."""
    timed = [each for each in cells if each.timed]
    pictures = [
        _beside("speed", timed, _speed, _SPEED) or _beside("tokens_a_pass", cells, _tokens, _TOKENS),
        _by_depth(cells) or _beside("acceptance", cells, _rate, _RATE),
    ]
    return [picture.save(folder) for picture in pictures if picture is not None]


def mark_of_arm(arm: ArmSpec) -> Mark:
    """How an arm is drawn: what is not selfspec's in grey, with a marker for each of its ways."""
    if arm.own:
        return mark_of(arm.draft)
    markers = {"generate": "o", "static": "s", "lookup": "v", "early-exit": "<", "assistant": "X"}
    return Mark(GREY, markers[arm.kind], filled=arm.kind == "generate")


def _marks(arms: Mapping[ArmSpec, str]) -> dict[str, Mark]:
    """Marks by short names. Lengths or rules of one draft are told apart, too."""
    return told_apart({shown: mark_of_arm(arm) for arm, shown in arms.items()})


def _speed(measured: MeasuredCell, arm: ArmSpec) -> Estimate | None:
    found = measured.figures.get(arm)
    return None if found is None else found.decoding_against.get("model_generate")


def _tokens(measured: MeasuredCell, arm: ArmSpec) -> Estimate | None:
    found = measured.figures.get(arm)
    return None if found is None or arm.draft is None else found.mean_accepted_length


def _rate(measured: MeasuredCell, arm: ArmSpec) -> Estimate | None:
    found = measured.figures.get(arm)
    return None if found is None or arm.draft is None else found.acceptance_rate


def _beside(name: str, cells: Sequence[MeasuredCell], value: _Value, label: str) -> Picture | None:
    """Draw a figure of every arm, a line each: cells as panels of dots, or, where they are many, as columns."""
    known = [each for each in cells if any(value(each, record.arm) for record in each.arms)]
    if not known:
        return None
    arms = short_names(record.arm for each in known for record in each.arms if value(each, record.arm))
    if len(known) > _FEW:
        return _heat_map(name, known, arms, value, label)
    marks = _marks(arms)
    panels = [
        Panel(
            title,
            partial(dots, lines={shown: value(each, arm) for arm, shown in arms.items()}, marks=marks, baseline=1.0),
        )
        for title, each in zip(titles(known), known, strict=True)
    ]
    return Picture(name, panels, 0.5 + _LINE * len(arms), note=label, finish=_from_zero)


def _from_zero(_: Figure, grid: Sequence[Axes]) -> None:
    grid[0].set_xlim(left=0)


def _by_depth(cells: Sequence[MeasuredCell]) -> Picture | None:
    """Draw acceptance by depth, where lines can be told apart."""
    drafting = [each for each in cells if any(map(_was_judged, each.arms))]
    arms = short_names(record.arm for each in drafting for record in each.arms if _was_judged(record))
    if not drafting or len(drafting) > _FEW or len(arms) > _LINES:
        return None
    marks = _marks(arms)
    panels = []
    for title, each in zip(titles(drafting), drafting, strict=True):
        by_arm = {record.arm: _shares(record) for record in each.arms if _was_judged(record)}
        shares = {shown: by_arm.get(arm, []) for arm, shown in arms.items()}
        panels.append(Panel(title, partial(curves, shares=shares, marks=marks)))
    return Picture("acceptance", panels, 2.4, note=_DEPTH, legend=marks)


def _heat_map(
    name: str, cells: Sequence[MeasuredCell], arms: Mapping[ArmSpec, str], value: _Value, label: str
) -> Picture:
    """Arms by line and places by column, with a panel for each temperature."""
    tables = {}
    for decoding in dict.fromkeys(each.cell.decoding for each in cells):
        some = [each for each in cells if each.cell.decoding == decoding]
        values = [[value(each, arm) for each in some] for arm in arms]
        table = np.array([[np.nan if found is None else found.value for found in line] for line in values])
        tables[decoding] = table, titles(some)

    def finish(figure: Figure, grid: Sequence[Axes]) -> None:
        one_scale(
            figure, grid, name.replace("_", " "), 0.0, float(max(np.nanmax(table) for table, _ in tables.values()))
        )
        for axes, (_, columns) in zip(grid, tables.values(), strict=True):
            axes.set_xticks(range(len(columns)), columns, rotation=90)

    panels = [
        Panel(decoding, partial(heat, values=table, rows=[*arms.values()], columns=columns, digits=".2f"))
        for decoding, (table, columns) in tables.items()
    ]
    return Picture(name, panels, 0.6 + _LINE * len(arms), across=1, note=label, share=False, finish=finish)


def _was_judged(record: Record) -> bool:
    return bool(record.scored and record.counts and record.counts.judged_per_depth)


def _shares(record: Record) -> list[Estimate]:
    """The share accepted at each depth, up to the first at which too few tokens were judged."""
    assert record.counts is not None
    pairs = zip(record.counts.accepted_per_depth, record.counts.judged_per_depth, strict=True)
    shares = [Estimate.of_share(*pair) for pair in takewhile(lambda pair: pair[1] >= _ENOUGH, pairs)]
    return [share for share in shares if share is not None]
