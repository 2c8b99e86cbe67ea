"""`selfspec bench`: ways to decode side by side on your own checkpoint, and a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.cli.options import (
    Chat,
    DraftLength,
    MemoryOptions,
    ModelOptions,
    Output,
    Repeats,
    Runtime,
    load_within,
    read_draft,
)
from selfspec.cli.outcome import FailedCheckError, FailedRunError
from selfspec.cli.terminal import console, print_tables, progress_bar
from selfspec.errors import DraftConfigError, UnsupportedOptionError
from selfspec.measure.embedded import DEMO

if TYPE_CHECKING:
    from selfspec.control.profile import Profile
    from selfspec.draft import Drafter
    from selfspec.measure.checkpoint import Checkpoint
    from selfspec.tools.lab.arms import ArmSpec, Cell
    from selfspec.tools.lab.generations import Part
    from selfspec.tools.lab.runs import Runs


_PRINTED = (
    "n",
    "speedup_over_generate",
    "speedup",
    "mean_accepted_length",
    "acceptance_rate",
    "perplexity_ratio",
    "absence",
)


class ExtraArm(StrEnum):
    """What `--arm` takes."""

    STATIC = "static"
    LOOK_UP = "lookup"
    DRAFT = "draft"


class Measured(StrEnum):
    """What `--measure` takes."""

    SPEED = "speed"
    COSTS = "costs"
    QUALITY = "quality"
    ACCEPTANCE = "acceptance"


class RefusedError(FailedCheckError):
    """Greedy tokens of an arm differ from those of `model.generate`, by more than rounding explains."""


@dataclass(frozen=True, kw_only=True)
class Arms:
    """Arms: ways to decode."""

    arm: Annotated[
        list[ExtraArm] | None,
        typer.Option(
            metavar="ARM",
            help="An arm besides `model.generate` and selfspec plain; may be repeated. `static`: model.generate "
            "compiled, with a static cache; `lookup`: its prompt look-up; `draft`: each --draft. Default: all, but "
            "`static` on a GPU only.",
        ),
    ] = None
    draft: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DRAFT",
            help="What drafts; may be repeated. Default: look-ups, an exit at a third of the depth, and both.",
        ),
    ] = None
    draft_length: DraftLength = None
    nodes: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Trees of at most N tokens of each --draft, beside its chains; may be repeated. Default: none."
        ),
    ] = None
    accept: Annotated[
        list[str] | None, typer.Option(metavar="RULE", help="Acceptance rule of the drafts; may be repeated.")
    ] = None
    runtime: Runtime = None

    def specs(self, model: ModelOptions) -> list[ArmSpec]:
        """The arms in the order of the report, checked as far as the configuration of the model allows.

        `model.generate` and selfspec's plain decoding are always among them.
        """
        from selfspec.accept import find_rule
        from selfspec.draft import Drafter
        from selfspec.model.checkpoint import find_device
        from selfspec.tools.lab.arms import ArmSpec, control_of, usual_runtime_name

        depth = model.prepare()
        device = find_device(model.device)
        third = max(depth // 3, 1)
        kinds: set[str] = {"lookup", "draft"} if self.arm is None else {*self.arm}
        if self.arm is None and device.type == "cuda":
            kinds.add("static")
        if "draft" not in kinds and (self.draft or self.accept or self.nodes):
            raise DraftConfigError("--draft, --accept and --nodes are for --arm draft; add it, or drop them")
        own = ArmSpec("plain", runtime=self.runtime or usual_runtime_name(device))
        drafts = [f"exit:{third}", "lookup", f"lookup+exit:{third}"] if self.draft is None else self.draft
        read: dict[str, tuple[str, Drafter | Profile | str | None]] = {}
        for draft in drafts:
            # Two spellings of a draft are one draft.
            drafter = read_draft(draft)
            read.setdefault(repr(drafter), (draft.strip(), drafter))
        named = dict(read.values())
        for drafter in named.values():
            if isinstance(drafter, Drafter):
                drafter.check(depth)
            if drafter is None:
                raise DraftConfigError("plain decoding is always among the arms; give --draft exit:E or another draft")
        like = replace(own, kind="draft", length=self.draft_length)
        rules = [replace(like, accept=rule, lossless=find_rule(rule).lossless) for rule in self.accept or ()]
        drafting = [
            replace(each, draft=draft, nodes=nodes)
            for draft, nodes, each in product(named, (None, *(self.nodes or ())), rules or [like])
            if "draft" in kinds
        ]
        for spec in drafting:
            control_of(spec.length, spec.nodes)
        stock = [spec for spec in (ArmSpec("static"), ArmSpec("lookup")) if spec.kind in kinds]
        return list(dict.fromkeys([ArmSpec("generate"), *stock, own, *drafting]))


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Cells: every combination of these."""

    workload: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=FILE",
            help="Prompts: JSONL with `prompt`, `turns`, `messages` (each turn is one) or `text`; may be repeated. "
            "`NAME=FILE#FIELD=VALUE` takes the lines that say so, `NAME=FILE#FIELD` makes a workload of each value; "
            "`demo` is four Python files.",
        ),
    ] = field(default_factory=lambda: ["demo"])
    temperature: Annotated[list[float], typer.Option(min=0, max=100, help="0: greedy decoding; may be repeated.")] = (
        field(default_factory=lambda: [0.0, 0.8])
    )
    batch: Annotated[list[int], typer.Option(min=1, help="Rows of a call; may be repeated.")] = field(
        default_factory=lambda: [1]
    )
    context: Annotated[
        list[int] | None,
        typer.Option(
            min=2,
            help="Cut or join prompts to N tokens, and let nothing end a text; may be repeated. Default: prompts are "
            "whole, and texts end where the model ends them.",
        ),
    ] = None
    chat: Chat = False
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each workload.")] = 4
    max_new_tokens: Annotated[int, typer.Option(min=16, help="Generate at most N tokens a text.")] = 64

    def grid(self, workloads: Sequence[str]) -> list[Cell]:
        """Every combination, once each, in the order given."""
        from selfspec.tools.lab.arms import Cell

        if self.chat and self.context:
            raise UnsupportedOptionError(
                "--context cuts prompts, and a chat is whole: drop one of --context and --chat"
            )
        conditions = product(workloads, self.batch, self.context or (None,), self.temperature)
        cells = (
            Cell(name, t, batch, context, self.max_new_tokens, self.chat) for name, batch, context, t in conditions
        )
        return list(dict.fromkeys(cells))


@dataclass(frozen=True, kw_only=True)
class MeasuredParts:
    """What is measured in each cell."""

    measure: Annotated[
        list[Measured] | None,
        typer.Option(
            metavar="PART",
            help="What to measure; may be repeated. `speed`, in turns; `costs` of the parts of a round by themselves, "
            "and speed-ups predicted from them; `quality`: how likely the model finds the texts of each arm; "
            "`acceptance` alone: drafts decode each prompt once, and nothing is timed. Default: the first two; with "
            "--memory `speed`.",
        ),
    ] = None
    repeats: Repeats = 5
    warm_up: Annotated[int, typer.Option(min=1, help="Decode all prompts N times before timing.")] = 3

    def parts(self, memory: str | None) -> frozenset[Part]:
        """What is measured of a model that is in memory whole, or within a budget."""
        asked: frozenset[Part] = frozenset(each.value for each in self.measure or ())
        if memory is not None and "costs" in asked:
            raise UnsupportedOptionError("--measure costs is for models in memory whole; drop it, or --memory")
        if "acceptance" in asked and asked - {"acceptance", "quality"}:
            raise UnsupportedOptionError("--measure acceptance times nothing; drop it, or all that is timed")
        usual: frozenset[Part] = frozenset({"speed"} if memory is not None else {"speed", "costs"})
        return asked | {"speed"} if asked and "acceptance" not in asked else asked or usual


@dataclass(frozen=True)
class Benched:
    """`selfspec bench`.

    Attributes:
        table: a line for each arm under each set of conditions, by the columns of docs/columns.md; figures are missing
            where an arm was absent or refused.
        provenance: what was measured, and with what.
        doubts: which figures cannot be, or say less than they seem to.
        files: of the report.
    """

    table: list[dict[str, Any]]
    provenance: list[dict[str, Any]]
    doubts: list[str]
    files: list[str]


def bench(
    model: ModelOptions,
    arms: Arms,
    cells: Cells,
    measured: MeasuredParts,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Take at most `6GiB`, say: all arms stream from the disk what does not fit."),
    ] = None,
    to: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Runs and report; cells that are there are not measured again.")
    ] = Path("bench"),
    output: Output = "text",
) -> Benched:
    """Measure ways to decode side by side: `model.generate` with its own speed-ups, and selfspec with each draft.

    Under each combination of workload, temperature, batch and context the arms take turns. Every text is a line of
    `runs.jsonl`, from which the report, its pictures and its tables are made. Repeat an interrupted command to resume
    it.

    Exit status 1 if any arm was refused because its greedy tokens differ from those of `model.generate`.
    """
    from selfspec.tools.lab.generations import latest
    from selfspec.tools.lab.report import provenances, require_packages, write_report
    from selfspec.tools.lab.runs import Runs
    from selfspec.tools.lab.table import doubts, records, summarise

    require_packages()
    runs = Runs(to)
    rows = _measure(model, arms, cells, measured, memory, runs)
    files, table = write_report("Benchmark", latest(runs.measured("generation")), {}, to), summarise(rows)
    result = Benched(records(table), provenances(rows), doubts(table), [*map(str, files)])
    if output == "text":
        print_tables(table, _PRINTED)
        for said in result.doubts:
            console().print(said, markup=False)
        console().print(f"{files[0]} has the rest.", style="dim")
    refused = [f"{row['arm']} ({row['conditions']})" for row in result.table if row.get("refused")]
    if refused:
        raise FailedRunError(RefusedError(f"greedy tokens differ: {'; '.join(refused)}"), result)
    return result


def _measure(
    model: ModelOptions, arms: Arms, cells: Cells, measured: MeasuredParts, memory: str | None, runs: Runs
) -> list[dict[str, Any]]:
    from selfspec.measure.prompts import check_reads_text, read_workloads
    from selfspec.tools.lab.arms import make_arm, with_prompts
    from selfspec.tools.lab.generations import Generations

    parts, workloads = measured.parts(memory), read_workloads(cells.workload)
    grid, specs = cells.grid(list(workloads)), arms.specs(model)
    if "acceptance" in parts:
        # Texts are worth more or less beside those of plain decoding.
        beside = {"draft", "plain"} if "quality" in parts else {"draft"}
        specs = [spec for spec in specs if spec.kind in beside]
    checkpoint = model.load() if memory is None else _within(model, memory, specs, cells)
    check_reads_text(checkpoint.model)
    name = "embedded" if model.model == DEMO else Path(model.model).name
    generations = Generations(
        name=name if memory is None else f"{name} within {memory}",
        model=checkpoint.model,
        arms=[make_arm(spec, checkpoint.model) for spec in specs],
        repeats=measured.repeats,
        warm_up=measured.warm_up,
        parts=parts,
        tokenizer=checkpoint.tokenizer,
    )
    prompted = with_prompts(grid, workloads, cells.prompts, checkpoint)
    with progress_bar("measuring") as progress:
        return generations.measure(prompted, runs, progress)


def _within(model: ModelOptions, memory: str, specs: Sequence[ArmSpec], cells: Cells) -> Checkpoint:
    """The model within a budget, with room for the longest texts of the largest batch."""
    from selfspec.measure.checkpoint import Checkpoint
    from selfspec.model.checkpoint import load_tokenizer

    # Of whole prompts nothing is known: then there is room for as many tokens as `load` makes by itself.
    room = None if cells.context is None else max(cells.batch) * (max(cells.context) + cells.max_new_tokens)
    tokenizer = load_tokenizer(model.place)
    drafts = [read_draft(spec.draft or "none") for spec in specs if spec.own]
    return Checkpoint(load_within(model, MemoryOptions(memory=memory, context=room), drafts).model, tokenizer)
