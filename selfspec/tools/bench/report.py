"""The report in Markdown, all of it made from the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from selfspec.files.writing import whole
from selfspec.tools.bench import figures, plots
from selfspec.tools.bench.arm import ArmKind, ArmSpec
from selfspec.tools.bench.markdown import escaped, table
from selfspec.tools.bench.prediction import prediction, round_cost
from selfspec.tools.bench.record import Record
from selfspec.tools.bench.results_file import MeasuredCell

REPORT = "report.md"

_NOTES = f"""\
Every arm decodes the same prompts in one process, one after the other on each batch. Speeds are tokens per second of
all rows together; ratios are taken repeat by repeat. Behind each median stands, in brackets, the interval between order
statistics that holds the true one with a confidence of at least 0.9 (of fewer than five repeats: their range).
*Decoding* leaves out the time until the first tokens stood; *whole calls* has it. *In cycles* is the share of tokens in
passages that stand three times or more in direct succession, which flatter any draft; *without cycles* are the prompts
whose text by `model.generate` has at most {figures.CYCLING:.0%} of these. No text ends before its last token. An arm
whose greedy tokens differ from those of `model.generate` in float32 or float64, or in half precision by more than
rounding explains, is refused. *Draft*, *verify* and *rest* are the parts of a round in this run; *c*, *V(4)* and *o*
those of the formula, timed apart from it, for four tokens to verify. *Predicted* is what the rounds would have given if
they had cost no more than c and V, and *efficiency* is measured by predicted."""


def report(cells: Sequence[MeasuredCell]) -> str:
    """All tables.

    Args:
        cells: at least one.
    """
    parts = ["# Benchmark", _NOTES, *_settings(cells), "## Overview", overview(cells)]
    for measured in cells:
        parts += [f"## {escaped(measured.cell.title)}", _heading(measured, cells), speeds(measured)]
        parts += [_not_scored(measured), rounds(measured), memory(measured)]
    return "\n\n".join(filter(None, parts)) + "\n"


def write_report(cells: Sequence[MeasuredCell], folder: Path, with_plots: bool) -> None:
    """Write `report.md` into a folder, and the plots if they are wanted.

    Raises:
        StorageError: they cannot be written; the results are kept.
    """
    text = report(cells)
    if with_plots:
        text += "\n" + "".join(f"![{Path(name).stem}]({name})\n" for name in plots.draw(cells, folder))
    with whole(folder / REPORT, plots.KEPT) as draft:
        draft.write_text(text, encoding="utf-8")


def overview(cells: Sequence[MeasuredCell]) -> str:
    """Decoding speed against `model.generate`: an arm a line and a cell a column, or the narrower way about."""
    title = "decoding, against model.generate"
    arms = list(dict.fromkeys(record.arm for measured in cells for record in measured.arms))
    names, places = [arm.name for arm in arms], [_short(measured) for measured in cells]
    by_arm = [[_against(_found(measured, arm), measured) for measured in cells] for arm in arms]
    if len(cells) <= len(arms):
        return table([title, *places], [[name, *shown] for name, shown in zip(names, by_arm, strict=True)])
    by_cell = zip(*by_arm, strict=True)
    return table([title, *names], [[place, *shown] for place, shown in zip(places, by_cell, strict=True)])


def speeds(measured: MeasuredCell) -> str:
    """The speed of each arm, and what its drafts were worth."""
    reference = _of_kind(measured, ArmKind.GENERATE)
    calm = [] if reference is None else figures.calls_without_cycles(reference)
    calls = len(figures.all_calls(reference)) if reference is not None else 0
    columns: dict[str, Callable[[Record], str]] = {
        "decoding, tokens/s": lambda arm: figures.speed(arm, figures.decoding).shown(0),
        "against model.generate": lambda arm: _ratio(arm, reference, figures.decoding),
        "against selfspec plain": lambda arm: _ratio(arm, _of_kind(measured, ArmKind.PLAIN), figures.decoding),
        f"without cycles ({len(calm)} of {calls} calls)": lambda arm: (
            _ratio(arm, reference, figures.decoding, calm) if calm else ""
        ),
        "whole calls": lambda arm: _ratio(arm, reference, figures.whole_call),
        "first token, ms": lambda arm: f"{1000 * figures.first_token_seconds(arm).value:.0f}",
        "mean accepted length": lambda arm: f"{figures.mean_accepted_length(arm):.2f}",
        "acceptance by depth": _acceptance,
        "in cycles": lambda arm: f"{figures.cycle_share(arm):.0%}",
        "equal texts": lambda arm: "" if arm.agreement is None else f"{arm.agreement.share:.0%}",
    }
    rows = [[arm.arm.name, *(shown(arm) for shown in columns.values())] for arm in measured.arms if arm.scored]
    return table(["", *columns], rows)


def rounds(measured: MeasuredCell) -> str:
    """What a round of each draft cost, and the speed-up that its passes' costs predict."""
    plain = _of_kind(measured, ArmKind.PLAIN)
    rows = []
    for record in measured.arms:
        cost = None if plain is None or not record.scored else round_cost(record, plain)
        if cost is None or plain is None:
            continue
        row = [
            f"{cost.steps:.2f}",
            f"{cost.drafted:.2f}",
            f"{cost.draft:.2f}",
            f"{cost.verify:.2f}",
            f"{cost.rest:.2f}",
        ]
        found = prediction(record, plain)
        row += _terms(record)
        if found is None:
            row += ["", "", ""]
        else:
            row += [f"{found.predicted:.2f}", found.measured.shown(2), f"{found.efficiency:.2f}"]
        rows.append([record.arm.name, *row])
    if not rows:
        return ""
    head = ["a round, in plain steps", "draft steps", "drafted", "draft", "verify", "rest"]
    return table([*head, "c", "V(4)", "o", "predicted speed-up", "measured", "efficiency"], rows)


def _terms(record: Record) -> list[str]:
    """The terms of the formula as they were timed apart from the run: c, V(4) and o."""
    if record.costs is None:
        return ["", "", ""]
    verify = record.costs.of_round(0 if record.costs.draft is None else 3, 3)
    steps = 3 * (record.costs.draft or 0.0)
    c = "" if record.costs.draft is None else f"{record.costs.draft:.2f}"
    return [c, "" if verify is None else f"{verify - steps:.2f}", f"{record.costs.overhead:.2f}"]


def memory(measured: MeasuredCell) -> str:
    """Peak memory of each arm, where it was measured."""
    plain = _of_kind(measured, ArmKind.PLAIN)
    rows = []
    for record in measured.arms:
        if record.memory is None:
            continue
        base = None if plain is None or plain.memory is None else plain.memory.peak
        cells = [_mib(record.memory.weights), _mib(record.memory.growth), _mib(record.memory.peak)]
        cells.append("" if not base else f"{record.memory.peak / base:.3f}")
        cells.append("" if record.counts is None else _mib(record.counts.cache_bytes))
        rows.append([record.arm.name, *cells])
    if not rows:
        return ""
    counted = next(record.memory.counted_by for record in measured.arms if record.memory is not None)
    head = [f"memory, MiB, counted by {counted}", "weights", "above them", "peak", "against selfspec plain", "KV cache"]
    return table(head, rows)


def _settings(cells: Sequence[MeasuredCell]) -> list[str]:
    lines = []
    for measured in cells:
        settings, environment = measured.settings, measured.arms[0].environment
        line = (
            f"{settings.model}, {settings.parameters / 1e6:.1f}M parameters, {settings.dtype}, {settings.repeats} "
            f"repeats, {settings.threads} threads, {environment['device']}, {environment['processor']}; selfspec "
            f"{environment['selfspec']}, commit {environment['commit'] or 'unknown'}, torch {environment['torch']}, "
            f"transformers {environment['transformers']}, Python {environment['python']}."
        )
        lines.append(escaped(line))
    return list(dict.fromkeys(lines))


def _heading(measured: MeasuredCell, cells: Sequence[MeasuredCell]) -> str:
    settings = measured.settings
    several = len({each.settings.model + each.settings.dtype for each in cells}) > 1
    return escaped(f"{settings.model}, {settings.dtype}, {settings.threads} threads") if several else ""


def _not_scored(measured: MeasuredCell) -> str:
    lines = []
    for record in measured.arms:
        if record.absence is not None:
            lines.append(f"- {escaped(record.arm.name)}: absent. {escaped(record.absence)}.")
        elif record.refused and record.agreement is not None:
            parted = record.agreement.texts - record.agreement.equal
            lines.append(
                f"- {escaped(record.arm.name)}: REFUSED. {parted} of {record.agreement.texts} greedy texts differ from "
                "those of model.generate."
            )
    return "\n".join(lines)


def _acceptance(record: Record) -> str:
    if record.counts is None:
        return ""
    shares = figures.acceptance_by_depth(record.counts)
    return " ".join("-" if share is None else f"{share:.2f}" for share in shares)


def _found(measured: MeasuredCell, arm: ArmSpec) -> Record | None:
    return next((record for record in measured.arms if record.arm == arm), None)


def _of_kind(measured: MeasuredCell, kind: ArmKind) -> Record | None:
    return next((record for record in measured.arms if record.arm.kind is kind and record.scored), None)


def _against(record: Record | None, measured: MeasuredCell) -> str:
    if record is None or record.absence is not None:
        return ""
    return "refused" if record.refused else _ratio(record, _of_kind(measured, ArmKind.GENERATE), figures.decoding)


def _ratio(record: Record, reference: Record | None, speeds: figures.Speeds, calls: Sequence[int] | None = None) -> str:
    return "" if reference is None else figures.ratio(record, reference, speeds, calls).shown(2)


def _short(measured: MeasuredCell) -> str:
    cell = measured.cell
    return f"{cell.workload}, T {cell.temperature:g}, {cell.batch} x {cell.context}"


def _mib(number: int) -> str:
    return f"{number / 2**20:.1f}"
