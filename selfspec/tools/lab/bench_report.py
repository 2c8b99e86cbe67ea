"""Report a benchmark, entirely from its runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec.measure.estimate import Estimate
from selfspec.tools.lab.arms import ArmSpec, short_names
from selfspec.tools.lab.measured import CYCLING, Figures, MeasuredCell, calls_without_cycles, titles
from selfspec.tools.lab.record import Record, differing
from selfspec.tools.lab.report import (
    GREY,
    Mark,
    Panel,
    Picture,
    Report,
    curves,
    distinct_marks,
    dots,
    heat,
    mark_of,
    one_scale,
    write_data,
)
from selfspec.tools.lab.runs import told_apart

_NOTES = f"""\
Every arm decodes the same prompts in one process, one after the other on each batch. Speeds are tokens per second of
all rows together; ratios are taken repeat by repeat. After each median, in brackets, is the interval between order
statistics that holds the true one with a confidence of at least 0.9 (of fewer than five repeats: their range); after
tokens a pass and acceptance a 95 % interval by a bootstrap over calls. Decoding leaves out the time until the first
tokens; whole calls have it. In cycles is the share of tokens in passages repeated three times or more in direct
succession, which flatter any draft; without cycles are the prompts whose text by model.generate has at most
{CYCLING:.0%} of these. An arm whose greedy tokens differ from those of model.generate in float32 or float64, or in half
precision by more than rounding explains, is refused if its rule is lossless. Draft, verify and rest are the parts of a
round in this run; c, V(4) and o those of the formula, timed apart from it, for four tokens to verify. Predicted is what
the rounds would have given if they had cost no more than c and V, and efficiency is measured by predicted."""


def write_report(cells: Sequence[MeasuredCell], folder: Path) -> list[Path]:
    """Write the pages, the pictures and a table of all texts into a folder; return the files."""
    pictures = draw(cells, folder)
    report = page(cells)
    for picture in pictures:
        report.picture(picture)
    data = write_data(by_prompt(cells), {"cells": [each.to_dict() for each in cells]}, folder, "texts")
    return [*pictures, *data, *report.write(folder)]


def page(cells: Sequence[MeasuredCell]) -> Report:
    """Return the report without its pictures."""
    report = Report("Benchmark")
    report.paragraph(_NOTES)
    models = told_apart((each.settings.model, each.settings.base) for each in cells)
    for setup in dict.fromkeys(_setup(each, models) for each in cells):
        report.paragraph(setup)
    report.heading("Overview")
    first = overview(cells, with_intervals=True)
    report.table([first.title, *first.columns], first.lines)
    several = len({each.settings.setting for each in cells}) > 1
    for measured in cells:
        report.heading(measured.cell.title)
        if several:
            report.paragraph(_setup(measured, models))
        report.points(measured.doubts)
        _speeds(report, measured)
        report.points(_not_scored(measured))
        _rounds(report, measured)
        _quality(report, measured)
        _memory(report, measured)
    return report


@dataclass(frozen=True)
class Overview:
    """A table of one figure, an arm a line and a cell a column, or the narrower way about; `title` names the figure."""

    title: str
    columns: list[str]
    lines: list[list[str]]


def overview(cells: Sequence[MeasuredCell], with_intervals: bool) -> Overview:
    """Return the first table."""
    title = "decoding, against model.generate" if any(each.timed for each in cells) else "tokens a pass"
    arms = short_names(record.arm for measured in cells for record in measured.arms)
    by_arm = [[_against(arm, measured, with_intervals) for measured in cells] for arm in arms]
    if len(cells) <= len(arms):
        lines = [[name, *shown] for name, shown in zip(arms.values(), by_arm, strict=True)]
        return Overview(title, titles(cells), lines)
    by_cell = zip(titles(cells), *by_arm, strict=True)
    return Overview(title, list(arms.values()), [list(row) for row in by_cell])


def by_prompt(cells: Sequence[MeasuredCell]) -> list[dict[str, Any]]:
    """Return a row for each text of each arm: prompt and text, and what its call took and counted."""
    rows = []
    for measured in cells:
        cell = measured.cell
        whose = {"model": measured.settings.model, "weights": measured.settings.base[:8]}
        place = {**whose, "workload": cell.workload, "temperature": cell.temperature, "batch": cell.batch}
        for record in measured.arms:
            for repeat, calls in enumerate(record.texts):
                for call, texts in enumerate(calls):
                    shared = {
                        "repeat": repeat,
                        "call": call,
                        "call_seconds": record.seconds[repeat][call] if measured.timed else None,
                        "call_passes": record.passes[repeat][call],
                        "call_judged_by_depth": record.judged[repeat][call],
                        "call_accepted_by_depth": record.accepted[repeat][call],
                    }
                    of_arm = {"arm": record.arm.name, "draft": record.arm.draft, "accept": record.arm.accept}
                    rows += [
                        {
                            **place,
                            **of_arm,
                            **shared,
                            "row": row,
                            "prompt": measured.asked[call][row] if measured.asked else None,
                            "new_tokens": len(text),
                            "text": record.said[repeat][call][row] if record.said else None,
                            "token_ids": text,
                        }
                        for row, text in enumerate(texts)
                    ]
    return rows


def _against(arm: ArmSpec, measured: MeasuredCell, with_interval: bool) -> str:
    if any(record.arm == arm and record.refused for record in measured.arms):
        return "refused"
    found = measured.figures.get(arm)
    if found is None:
        return ""
    value = found.decoding_against.get("model_generate") if measured.timed else found.mean_accepted_length
    if value is None or with_interval:
        return _shown(value)
    return f"{value.value:.2f}"


def _speeds(report: Report, measured: MeasuredCell) -> None:
    """Add the speed of each arm, and what its drafts were worth."""
    reference = measured.scored("generate")
    calm, calls = (len(calls_without_cycles(reference)), len(reference.seconds[0])) if reference else (0, 0)
    timed: dict[str, Callable[[Figures], str]] = {
        "decoding, tokens/s": lambda arm: _shown(arm.decoding_tokens_per_second, 0),
        "against model.generate": lambda arm: _shown(arm.decoding_against.get("model_generate")),
        "against selfspec plain": lambda arm: _shown(arm.decoding_against.get("plain")),
        f"without cycles ({calm} of {calls} calls)": lambda arm: _shown(arm.decoding_without_cycles),
        "whole calls": lambda arm: _shown(arm.whole_call_against),
        "first token, ms": lambda arm: f"{1000 * arm.first_token_seconds.value:.0f}" if arm.first_token_seconds else "",
    }
    counted: dict[str, Callable[[Figures], str]] = {
        "tokens a pass": lambda arm: _shown(arm.mean_accepted_length),
        "acceptance": lambda arm: _shown(arm.acceptance_rate),
        "by depth": lambda arm: " ".join(
            "-" if share is None else f"{share:.2f}" for share in arm.acceptance_by_depth or []
        ),
        "in cycles": lambda arm: f"{arm.cycle_share:.0%}",
    }
    columns = {**(timed if measured.timed else {}), **counted}
    rows = []
    for record in measured.arms:
        if record.scored:
            found, same = measured.figures[record.arm], record.agreement
            shown = [column(found) for column in columns.values()]
            rows.append([record.arm.name, *shown, f"{same.equal / same.texts:.0%}" if same else ""])
    report.table(["", *columns, "equal texts"], rows)


def _not_scored(measured: MeasuredCell) -> list[str]:
    lines = []
    for record in measured.arms:
        found = record.agreement
        if record.absence is not None:
            lines.append(f"{record.arm.name}: absent. {record.absence}.")
        elif found is not None and record.refused:
            parted = f"{found.texts - found.equal} of {found.texts} greedy texts"
            lines.append(f"{record.arm.name}: REFUSED. {parted} differ from those of model.generate.")
    return lines


def _rounds(report: Report, measured: MeasuredCell) -> None:
    """Add the cost of each draft's rounds, and the speed-up that the costs of its passes predict."""
    head = ["a round, in plain steps", "draft steps", "drafted", "draft", "verify", "rest", "c", "V(4)", "o"]
    rows = []
    for record in measured.arms:
        found = measured.figures.get(record.arm)
        if found is None or found.round_in_plain_steps is None:
            continue
        cost, speedup = found.round_in_plain_steps, found.prediction
        parts = (cost.steps, cost.drafted, cost.draft, cost.verify, cost.rest)
        row = [record.arm.name, *(f"{each:.2f}" for each in parts), *map(_shown, _terms(record))]
        if speedup is not None:
            row += [_shown(speedup.predicted), _shown(speedup.measured), f"{speedup.efficiency:.2f}"]
        rows.append([*row, "", "", ""][: len(head) + 3])
    report.table([*head, "predicted speed-up", "measured", "efficiency"], rows)


def _terms(record: Record) -> list[Estimate | None]:
    """Return c, V(4) and o as they were timed apart from the run."""
    costs = record.costs
    if costs is None:
        return [None, None, None]
    verify = costs.from_tokens if costs.draft is None else costs.verify
    return [costs.draft, verify.get(4), costs.overhead]


def _quality(report: Report, measured: MeasuredCell) -> None:
    """Add how likely the model finds the texts of each arm, and which differ from plain decoding's."""
    found = measured.qualities
    rows = [
        [
            arm.name + ("" if arm.lossless else " (not lossless)"),
            _shown(each.perplexity),
            _shown(each.against_plain),
            "" if each.p_value is None else f"{each.p_value:.2g}",
        ]
        for arm, each in found.items()
    ]
    report.table(["perplexity of the texts under the model", "", "ratio to selfspec plain", "p"], rows)
    if found:
        report.paragraph(quality_sentence(measured))


def quality_sentence(measured: MeasuredCell) -> str:
    """Say whether texts of arms differ from plain decoding's by more than chance, at 5 % for all of them together."""
    if not any(each.p_value is not None for each in measured.qualities.values()):
        return "There are no texts by plain decoding to compare these with."
    far = [arm.name for arm in differing(measured.qualities)]
    if not far:
        return "No arm's texts are more or less likely than plain decoding's by more than chance."
    return f"Texts that are more or less likely than plain decoding's by more than chance: {'; '.join(far)}."


def _memory(report: Report, measured: MeasuredCell) -> None:
    """Add the peak memory of each arm, where it was measured."""
    plain = measured.scored("plain")
    rows, counted = [], ""
    for record in measured.arms:
        found = record.memory
        if found is None:
            continue
        counted = counted or found.counted_by
        against = f"{found.peak / plain.memory.peak:.3f}" if plain and plain.memory and plain.memory.peak else ""
        cache = _mib(record.counts.cache_bytes) if record.counts else ""
        rows.append([record.arm.name, *map(_mib, (found.weights, found.growth, found.peak)), against, cache])
    head = [f"memory, MiB, counted by {counted}", "weights", "above them", "peak", "against selfspec plain", "KV cache"]
    report.table(head, rows)


def _setup(measured: MeasuredCell, models: Mapping[tuple[str, str], str]) -> str:
    settings, environment = measured.settings, measured.environment
    repeats = f"{settings.repeats} repeats" if settings.repeats else "not timed"
    return (
        f"{models[settings.model, settings.base]}, {settings.parameters / 1e6:.1f}M parameters, {settings.dtype}, "
        f"{repeats}, {settings.threads} threads, {environment['device']}, {environment['processor']}; selfspec "
        f"{environment['selfspec']}, commit {environment['commit'] or 'unknown'}, torch {environment['torch']}, "
        f"transformers {environment['transformers']}, Python {environment['python']}."
    )


def _shown(ratio: Estimate | None, digits: int = 2) -> str:
    return "" if ratio is None else ratio.shown(digits)


def _mib(number: int) -> str:
    return f"{number / 2**20:.1f}"


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
    """Draw the pictures that there are results for; return the files."""
    timed = [each for each in cells if each.timed]
    pictures = [
        _beside("speed", timed, _speed, _SPEED) or _beside("tokens_a_pass", cells, _tokens, _TOKENS),
        _by_depth(cells) or _beside("acceptance", cells, _rate, _RATE),
    ]
    return [picture.save(folder) for picture in pictures if picture is not None]


def mark_of_arm(arm: ArmSpec) -> Mark:
    """Return the mark of an arm: those that are not selfspec's are grey, with a marker for each."""
    if arm.own:
        return mark_of(arm.draft)
    markers = {"generate": "o", "static": "s", "lookup": "v", "early-exit": "<", "assistant": "X"}
    return Mark(GREY, markers[arm.kind], filled=arm.kind == "generate")


def _marks(arms: Mapping[ArmSpec, str]) -> dict[str, Mark]:
    """Return marks by short names, which also tell apart lengths or rules of one draft."""
    return distinct_marks({shown: mark_of_arm(arm) for arm, shown in arms.items()})


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
    """Draw arms by line and places by column, with a panel for each temperature."""
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
    """Return the share accepted at each depth, up to the first at which too few tokens were judged."""
    assert record.counts is not None
    pairs = zip(record.counts.accepted_per_depth, record.counts.judged_per_depth, strict=True)
    shares = [Estimate.of_share(*pair) for pair in takewhile(lambda pair: pair[1] >= _ENOUGH, pairs)]
    return [share for share in shares if share is not None]
