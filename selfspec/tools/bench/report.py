"""The report in Markdown, all of it made from the results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from selfspec.files.writing import whole
from selfspec.measure.estimate import Estimate
from selfspec.tools.bench import plots
from selfspec.tools.bench.arms import ArmSpec
from selfspec.tools.bench.figures import CYCLING, Figures, calls_without_cycles
from selfspec.tools.bench.quality.picture import draw_quality
from selfspec.tools.bench.quality.record import QualityRecord
from selfspec.tools.bench.quality.tables import tables
from selfspec.tools.bench.record import Record
from selfspec.tools.bench.results import MeasuredCell

REPORT = "report.md"

_NOTES = f"""\
Every arm decodes the same prompts in one process, one after the other on each batch. Speeds are tokens per second of
all rows together; ratios are taken repeat by repeat. After each median, in brackets, is the interval between order
statistics that holds the true one with a confidence of at least 0.9 (of fewer than five repeats: their range).
*Decoding* leaves out the time until the first tokens; *whole calls* has it. *In cycles* is the share of tokens in
passages repeated three times or more in direct succession, which flatter any draft; *without cycles* are the prompts
whose text by `model.generate` has at most {CYCLING:.0%} of these. No text ends before its last token. An arm
whose greedy tokens differ from those of `model.generate` in float32 or float64, or in half precision by more than
rounding explains, is refused if its rule is lossless. *Draft*, *verify* and *rest* are the parts of a round in this
run; *c*, *V(4)* and *o* those of the formula, timed apart from it, for four tokens to verify. *Predicted* is what the
rounds would have given if they had cost no more than c and V, and *efficiency* is measured by predicted."""

_QUALITY_NOTES = """\
# Quality

Every arm answers the same whole prompts, one at a time. Texts are held against the references of the workload, or,
where it has none, against a text by plain decoding: the same one where greedy, another sample where sampled. Scores are
means over prompts with 95 % intervals by a bootstrap over prompts: exact match, sentence BLEU (sacrebleu), F-measure of
ROUGE-L (rouge-score), tests passed, and the perplexity of the text under the target at temperature 1. *Less plain* is
the difference from plain decoding on the same prompts, *ratio* that of perplexities. A difference counts as more
than chance by Fisher's permutation test of signs at 5 %, for all comparisons of a table together (Holm)."""

_SPECIAL = re.compile(r"[\\`*\[\]<>|~&#$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# What makes a list of a line that begins with it.
_BEGINNING = re.compile(r"^(\d*)([-+.)])(?= )")


def report(cells: Sequence[MeasuredCell], quality: Sequence[QualityRecord] = ()) -> str:
    """All tables."""
    parts = ["# Benchmark", _NOTES, *dict.fromkeys(map(_setup, cells)), "## Overview", overview(cells)]
    several = len({each.settings.model + each.settings.dtype for each in cells}) > 1
    for measured in cells:
        settings = measured.settings
        parts.append(f"## {_escaped(measured.cell.title)}")
        if several:
            parts.append(_escaped(f"{settings.model}, {settings.dtype}, {settings.threads} threads"))
        parts += [_speeds(measured), _not_scored(measured), _rounds(measured), _candidates(measured), _memory(measured)]
    if quality:
        parts.append(_QUALITY_NOTES)
    for found in tables(quality):
        parts += [f"## {_escaped(found.title)}", _escaped(found.sentence), _table(found.head, found.rows)]
    return "\n\n".join(filter(None, parts)) + "\n"


def write_report(
    cells: Sequence[MeasuredCell], folder: Path, with_plots: bool, quality: Sequence[QualityRecord] = ()
) -> None:
    """Write `report.md` into a folder, and the plots if they are wanted."""
    text = report(cells, quality)
    if with_plots:
        names = plots.draw(cells, folder) + draw_quality(cells, quality, folder, plots.KEPT)
        text += "\n" + "".join(f"![{Path(name).stem}]({name})\n" for name in names)
    with whole(folder / REPORT, plots.KEPT) as draft:
        draft.write_text(text, encoding="utf-8")


def overview(cells: Sequence[MeasuredCell]) -> str:
    """Decoding speed against `model.generate`: an arm a line and a cell a column, or the narrower way about."""
    title = "decoding, against model.generate"
    arms = list(dict.fromkeys(record.arm for measured in cells for record in measured.arms))
    conditions = [measured.cell for measured in cells]
    places = [f"{cell.workload}, T {cell.temperature:g}, {cell.batch} x {cell.context}" for cell in conditions]
    by_arm = [[_against(arm, measured) for measured in cells] for arm in arms]
    if len(cells) <= len(arms):
        return _table([title, *places], [[arm.name, *shown] for arm, shown in zip(arms, by_arm, strict=True)])
    by_cell = zip(places, *by_arm, strict=True)
    return _table([title, *(arm.name for arm in arms)], by_cell)


def _against(arm: ArmSpec, measured: MeasuredCell) -> str:
    if any(record.arm == arm and record.refused for record in measured.arms):
        return "refused"
    found = measured.figures.get(arm)
    return "" if found is None else _shown(found.decoding_against.get("model_generate"))


def _speeds(measured: MeasuredCell) -> str:
    """The speed of each arm, and what its drafts were worth."""
    reference = measured.scored("generate")
    calm, calls = (len(calls_without_cycles(reference)), len(reference.seconds[0])) if reference else (0, 0)
    columns: dict[str, Callable[[Figures], str]] = {
        "decoding, tokens/s": lambda arm: arm.decoding_tokens_per_second.shown(0),
        "against model.generate": lambda arm: _shown(arm.decoding_against.get("model_generate")),
        "against selfspec plain": lambda arm: _shown(arm.decoding_against.get("plain")),
        f"without cycles ({calm} of {calls} calls)": lambda arm: _shown(arm.decoding_without_cycles),
        "whole calls": lambda arm: _shown(arm.whole_call_against),
        "first token, ms": lambda arm: f"{1000 * arm.first_token_seconds.value:.0f}",
        "mean accepted length": lambda arm: f"{arm.mean_accepted_length:.2f}",
        "acceptance by depth": lambda arm: " ".join(
            "-" if share is None else f"{share:.2f}" for share in arm.acceptance_by_depth or []
        ),
        "in cycles": lambda arm: f"{arm.cycle_share:.0%}",
    }
    rows = []
    for record in measured.arms:
        if record.scored:
            found, same = measured.figures[record.arm], record.agreement
            shown = [column(found) for column in columns.values()]
            rows.append([record.arm.name, *shown, f"{same.equal / same.texts:.0%}" if same else ""])
    return _table(["", *columns, "equal texts"], rows)


def _not_scored(measured: MeasuredCell) -> str:
    lines = []
    for record in measured.arms:
        name, found = _escaped(record.arm.name), record.agreement
        if record.absence is not None:
            lines.append(f"- {name}: absent. {_escaped(record.absence)}.")
        elif found is not None and record.refused:
            parted = f"{found.texts - found.equal} of {found.texts} greedy texts"
            lines.append(f"- {name}: REFUSED. {parted} differ from those of model.generate.")
    return "\n".join(lines)


def _rounds(measured: MeasuredCell) -> str:
    """What a round of each draft cost, and the speed-up that its passes' costs predict."""
    head = ["a round, in plain steps", "draft steps", "drafted", "draft", "verify", "rest", "c", "V(4)", "o"]
    rows = []
    for record in measured.arms:
        found = measured.figures.get(record.arm)
        if found is None or found.round_in_plain_steps is None:
            continue
        cost, speedup = found.round_in_plain_steps, found.prediction
        parts = (cost.steps, cost.drafted, cost.draft, cost.verify, cost.rest, *_terms(record))
        row = [record.arm.name, *("" if each is None else f"{each:.2f}" for each in parts)]
        if speedup is not None:
            row += [f"{speedup.predicted:.2f}", speedup.measured.shown(2), f"{speedup.efficiency:.2f}"]
        rows.append([*row, "", "", ""][: len(head) + 3])
    return _table([*head, "predicted speed-up", "measured", "efficiency"], rows) if rows else ""


def _candidates(measured: MeasuredCell) -> str:
    """What several candidates for one place are worth to each draft of trees."""
    head = ["candidates for one place", "how many", "accepted", "by the best rule there could be"]
    rows = [
        [record.arm.name, str(each.count), each.accepted.shown(2), each.best.shown(2)]
        for record in measured.arms
        for each in record.candidates
    ]
    return _table(head, rows) if rows else ""


def _terms(record: Record) -> list[float | None]:
    """The terms of the formula as they were timed apart from the run: c, V(4) and o."""
    costs = record.costs
    if costs is None:
        return [None, None, None]
    steps = 0 if costs.draft is None else 3
    verify = costs.of_round(steps, 3)
    return [costs.draft, None if verify is None else verify - steps * (costs.draft or 0.0), costs.overhead]


def _memory(measured: MeasuredCell) -> str:
    """Peak memory of each arm, where it was measured."""
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
    return _table(head, rows) if rows else ""


def _setup(measured: MeasuredCell) -> str:
    settings, environment = measured.settings, measured.arms[0].environment
    return _escaped(
        f"{settings.model}, {settings.parameters / 1e6:.1f}M parameters, {settings.dtype}, {settings.repeats} "
        f"repeats, {settings.threads} threads, {environment['device']}, {environment['processor']}; selfspec "
        f"{environment['selfspec']}, commit {environment['commit'] or 'unknown'}, torch {environment['torch']}, "
        f"transformers {environment['transformers']}, Python {environment['python']}."
    )


def _shown(ratio: Estimate | None) -> str:
    return "" if ratio is None else ratio.shown(2)


def _mib(number: int) -> str:
    return f"{number / 2**20:.1f}"


def _escaped(text: str) -> str:
    """A text as Markdown that shows it, in one line: no markup, no HTML, no end of a table's cell."""
    line = "".join(letter if letter.isprintable() else "\ufffd" for letter in " ".join(text.split()))
    return _BEGINNING.sub(r"\1\\\2", _SPECIAL.sub(r"\\\g<0>", line))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts, whatever they hold."""
    lines = [list(map(_escaped, head)), ["---"] * len(head), *(map(_escaped, row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
