"""Speed against quality: what the thresholds of the relaxed rules gain and cost, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec.files.writing import whole
from selfspec.measure.estimate import Estimate
from selfspec.measure.palette import BLACK, BLUE, PALE, STYLE, VERMILION, Mark
from selfspec.tools.bench.arms import ArmSpec
from selfspec.tools.bench.quality.record import QualityRecord, QualitySetup, of_conditions, plain_of
from selfspec.tools.bench.quality.tables import NAMES
from selfspec.tools.bench.results import MeasuredCell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUALITY = "quality.png"

# Inches: of a page within its margins, and of a panel.
_WIDTH, _PAGE, _HEIGHT = 7.2, 9.2, 2.8
_DPI = 150
_MARKERS = "oDs^vPX"


def draw_quality(cells: Sequence[MeasuredCell], records: Sequence[QualityRecord], folder: Path, kept: str) -> list[str]:
    """Draw the arms that were both timed and scored, where a relaxed rule is among them; return the files' names."""
    shown = {
        setup: here
        for setup, here in of_conditions(records).items()
        if any(not record.lossless for record in here) and _speeds(cells, setup)
    }
    if not shown:
        (folder / QUALITY).unlink(missing_ok=True)
        return []
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    marks = _marks([record for here in shown.values() for record in here])
    with rc_context(STYLE):
        height = min(_PAGE, 0.4 + _HEIGHT * len(shown))
        figure = Figure((_WIDTH, height), layout="constrained")
        panels = figure.subplots(len(shown), 2, squeeze=False, sharex=True).tolist()
        for (left, right), (setup, here) in zip(panels, shown.items(), strict=True):
            speeds = _speeds(cells, setup)
            task = "passed" if here[0].passed else "rouge_l"
            _panel(left, here, speeds, task, marks)
            _panel(right, here, speeds, "perplexity", marks)
            how = f"temperature {setup.temperature:g}" if setup.temperature else "greedy"
            left.set_title(f"{setup.workload}, {how}")
            left.set_ylabel(f"{NAMES[task]}, against {here[0].against}" if task == "rouge_l" else NAMES[task])
            right.set_ylabel("perplexity under the target")
        figure.supxlabel(
            "decoding speed, times selfspec's plain decoding. Bars and, of plain decoding, the band: intervals",
            fontsize=7,
        )
        names = {record.arm: _short(record) for here in shown.values() for record in here}
        keys = [Line2D([], [], label=names[arm], **{**mark.of_line, "linestyle": ""}) for arm, mark in marks.items()]
        figure.legend(handles=keys, loc="outside upper center", ncols=min(3, len(keys)))
        with whole(folder / QUALITY, kept) as draft:
            figure.savefig(draft, dpi=_DPI)
    return [QUALITY]


def _speeds(cells: Sequence[MeasuredCell], setup: QualitySetup) -> dict[ArmSpec, Estimate]:
    """Of the arms in the first cell that fits: workload, temperature and one row."""
    for measured in cells:
        cell = measured.cell
        if (cell.workload, cell.temperature, cell.batch) == (setup.workload, setup.temperature, 1):
            found = {arm: each.decoding_against.get("plain") for arm, each in measured.figures.items()}
            return {arm: speed for arm, speed in found.items() if speed is not None}
    return {}


def _panel(
    panel: Axes,
    records: Sequence[QualityRecord],
    speeds: dict[ArmSpec, Estimate],
    name: str,
    marks: dict[ArmSpec, Mark],
) -> None:
    plain = plain_of(records)
    if plain is not None and name in plain.figures:
        panel.axhspan(plain.figures[name].low, plain.figures[name].high, color=PALE, alpha=0.3, lw=0)
    for record in records:
        speed, quality = speeds.get(record.arm), record.figures.get(name)
        if speed is not None and quality is not None and record.arm in marks:
            panel.errorbar(
                speed.value,
                quality.value,
                [[quality.value - quality.low], [quality.high - quality.value]],
                [[speed.value - speed.low], [speed.high - speed.value]],
                elinewidth=0.7,
                **{**marks[record.arm].of_line, "linestyle": ""},
            )
    if name == "passed":
        panel.set_ylim(-0.03, 1.03)
    panel.grid()


def _marks(records: Sequence[QualityRecord]) -> dict[ArmSpec, Mark]:
    """Of selfspec's arms: plain decoding black, lossless drafts blue, relaxed rules red, with a marker each."""
    marks: dict[ArmSpec, Mark] = {}
    for record in records:
        if record.arm.own and record.arm not in marks:
            colour = BLACK if record.arm.kind == "plain" else BLUE if record.lossless else VERMILION
            alike = sum(mark.colour == colour for mark in marks.values())
            marks[record.arm] = Mark(colour, _MARKERS[alike % len(_MARKERS)], filled=alike < len(_MARKERS))
    return marks


def _short(record: QualityRecord) -> str:
    """A name for a point: the draft, and the rule where it is relaxed."""
    rule = record.arm.accept
    if record.arm.draft is None:
        return "plain"
    if record.lossless or rule is None:
        return record.arm.draft
    name, _, thresholds = rule.partition(":")
    kind = name.removeprefix("relaxed-")
    return f"{kind} {thresholds.replace(',', ', ')}".strip()
