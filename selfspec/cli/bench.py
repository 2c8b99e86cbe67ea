"""`selfspec bench`: ways to decode side by side on your own checkpoint, and a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from selfspec.cli.options import (
    Budget,
    DraftLength,
    ModelOptions,
    Output,
    Repeats,
    load_within,
    one_draft_in_fewer_bits,
    read_draft,
)
from selfspec.cli.outcome import NO_MODEL, FailedCheckError, FailedRunError
from selfspec.cli.terminal import StepBar, console, progress_bar
from selfspec.errors import BenchError, DraftConfigError, UnsupportedOptionError
from selfspec.measure.embedded import DEMO

if TYPE_CHECKING:
    from selfspec.measure.prompts import Workload
    from selfspec.model.checkpoint import Checkpoint
    from selfspec.tools.bench.arms import ArmSpec
    from selfspec.tools.bench.cell import Cell
    from selfspec.tools.bench.results import MeasuredCell, ResultsFile


class ExtraArm(StrEnum):
    """What `--arm` takes."""

    STATIC = "static"
    LOOK_UP = "lookup"
    EARLY_EXIT = "early-exit"
    ASSISTANT = "assistant"
    DRAFT = "draft"


class RefusedError(FailedCheckError):
    """Greedy tokens of an arm differ from those of `model.generate`, by more than rounding explains."""


@dataclass(frozen=True, kw_only=True)
class ModelToBench(ModelOptions):
    """Device and weights."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help=f"A checkpoint folder, a hub name, or `{DEMO}` for the embedded model; none with --report.",
        ),
    ] = ""


@dataclass(frozen=True, kw_only=True)
class Arms:
    """Arms: ways to decode."""

    arm: Annotated[
        list[ExtraArm] | None,
        typer.Option(
            metavar="ARM",
            help="An arm besides `model.generate` and selfspec plain; may be repeated. `static`: model.generate "
            "compiled, with a static cache; `lookup`: its prompt look-up; `early-exit`: its own early exit, and "
            "selfspec's of the same layer and length; `assistant`: its `assistant_model`, of each --draft "
            "assistant:FOLDER; `draft`: each --draft. Default: all, `static` on a GPU only.",
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
    runtime: Annotated[
        Literal["eager", "traced", "compiled", "graphs"] | None,
        typer.Option(
            metavar="RUNTIME",
            help="How selfspec runs passes: `eager`, `traced`, `compiled` (with a larger --warm-up: each kind of pass "
            "compiles for some ten seconds) or `graphs`, on a CUDA device only. Default: `graphs` there, else "
            "`traced`.",
        ),
    ] = None
    exit_layer: Annotated[
        int | None, typer.Option(min=1, help="Exit of `early-exit`; default: a third of the depth.")
    ] = None
    exit_length: Annotated[int, typer.Option(min=1, help="Tokens that `early-exit` drafts a round.")] = 3

    def specs(self, model: ModelOptions) -> list[ArmSpec]:
        """The arms in the order of the report, checked as far as the configuration of the model allows.

        `model.generate` and selfspec's plain decoding are always among them.
        """
        from selfspec.control.fixed import control_of
        from selfspec.draft import Drafter
        from selfspec.model.checkpoint import find_device
        from selfspec.runtime.named import RuntimeName
        from selfspec.tools.bench.arms import ASSISTANT, ArmSpec

        depth = model.prepare()
        on_cuda = find_device(model.device).type == "cuda"
        third = max(depth // 3, 1)
        exit_layer = self.exit_layer or third
        kinds: set[str] = {"lookup", "early-exit", "assistant", "draft"} if self.arm is None else {*self.arm}
        if self.arm is None and on_cuda:
            kinds.add("static")
        if "early-exit" in kinds and exit_layer >= depth:
            raise DraftConfigError(
                f"--exit-layer {exit_layer} is out of range: the model has {depth} layers; choose 1..{depth - 1}"
            )
        runtime = RuntimeName(self.runtime or (RuntimeName.GRAPHS if on_cuda else RuntimeName.TRACED))
        own = ArmSpec("plain", packed=model.packed, runtime=runtime)
        early = ArmSpec("early-exit", exit_layer=exit_layer, length=self.exit_length)
        named = [draft.strip() for draft in self.draft or ()]
        assistants = [ArmSpec("assistant", draft) for draft in named if draft.startswith(ASSISTANT)]
        if ExtraArm.ASSISTANT in (self.arm or ()) and not assistants:
            raise DraftConfigError("--arm assistant needs one to take: add --draft assistant:FOLDER")
        stock = [spec for spec in (ArmSpec("static"), ArmSpec("lookup"), early, *assistants) if spec.kind in kinds]
        drafting = []
        if "early-exit" in kinds:
            drafting.append(replace(own, kind="draft", draft=f"exit:{exit_layer}", length=self.exit_length))
        if "draft" in kinds:
            drafts = [f"exit:{third}", "lookup", f"lookup+exit:{third}"] if self.draft is None else named
            drafting += [
                replace(own, kind="draft", draft=draft, length=self.draft_length, nodes=nodes, accept=rule)
                for draft, nodes, rule in product(drafts, (None, *(self.nodes or ())), self.accept or (None,))
            ]
        for spec in drafting:
            control_of(spec.length, spec.nodes)
            drafter = read_draft(spec.draft or "")
            if isinstance(drafter, Drafter):
                drafter.check(depth)
            if drafter is None:
                raise DraftConfigError("plain decoding is always among the arms; give --draft exit:E or another draft")
        return list(dict.fromkeys([ArmSpec("generate"), *stock, own, *drafting]))


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Cells: every combination of these."""

    workload: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=FILE",
            help="Prompts: JSONL with `prompt`, `turns` or `text`; may be repeated. `NAME=FILE#FIELD=VALUE` takes the "
            "lines that say so, `NAME=FILE#FIELD` makes a workload of each value; `demo` is four Python files.",
        ),
    ] = field(default_factory=lambda: ["demo"])
    temperature: Annotated[list[float], typer.Option(min=0, max=100, help="0: greedy decoding; may be repeated.")] = (
        field(default_factory=lambda: [0.0, 0.8])
    )
    batch: Annotated[list[int], typer.Option(min=1, help="Rows of a call; may be repeated.")] = field(
        default_factory=lambda: [1]
    )
    context: Annotated[list[int], typer.Option(min=2, help="Tokens of every prompt; may be repeated.")] = field(
        default_factory=lambda: [64]
    )
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each workload.")] = 4
    max_new_tokens: Annotated[int, typer.Option(min=16, help="Generate N tokens a text.")] = 64

    def grid(self, workloads: Sequence[str]) -> list[Cell]:
        """Every combination, once each, in the order given."""
        from selfspec.tools.bench.cell import Cell

        conditions = product(workloads, self.batch, self.context, self.temperature)
        cells = (Cell(name, t, batch, context, self.max_new_tokens) for name, batch, context, t in conditions)
        return list(dict.fromkeys(cells))


@dataclass(frozen=True, kw_only=True)
class MeasuredParts:
    """What is measured in each cell."""

    repeats: Repeats = 5
    warm_up: Annotated[int, typer.Option(min=1, help="Decode all prompts N times before timing.")] = 3
    peaks: Annotated[
        bool | None,
        typer.Option(
            help="Measure peak memory, each arm in its own process, once per batch and context. Default: without "
            "--memory alone."
        ),
    ] = None
    costs: Annotated[
        bool | None,
        typer.Option(
            help="Time the parts of a round by themselves, and predict speed-ups from them. Default: without --memory "
            "alone."
        ),
    ] = None

    quality: Annotated[
        bool,
        typer.Option(
            "--quality",
            help="Score the texts of every arm too: exact match, BLEU, ROUGE-L and perplexity, against `reference` in "
            "the lines of a workload, or plain decoding's own text.",
        ),
    ] = False
    quality_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="With --quality: score N prompts of each workload; by default as many as are timed."),
    ] = None
    run_code: Annotated[
        bool,
        typer.Option(
            "--run-code",
            help="With --quality: run what the model writes, with HumanEval's tests, in a process with limits and "
            "without network. It stops accidents, not an attacker.",
        ),
    ] = False

    def check_quality(self) -> None:
        """Refuse before work starts what cannot be scored."""
        from selfspec.tools.bench.quality.sandbox import check_system
        from selfspec.tools.bench.quality.scores import require_packages

        if self.run_code and not self.quality:
            raise UnsupportedOptionError("--run-code runs the texts that --quality scores; give both")
        if self.quality_prompts is not None and not self.quality:
            raise UnsupportedOptionError("--quality-prompts has no effect without --quality; give both")
        if self.quality:
            require_packages()
        if self.run_code:
            check_system()

    def within(self, memory: str | None) -> MeasuredParts:
        """What is measured of a model that is in memory whole, or within a budget."""
        if memory is not None and (self.peaks or self.costs):
            raise UnsupportedOptionError("--peaks and --costs are for models in memory whole; drop them, or --memory")
        whole = memory is None
        return replace(self, peaks=whole and self.peaks is not False, costs=whole and self.costs is not False)


@dataclass(frozen=True)
class BenchCell:
    """All arms under one set of conditions; figures of an arm are missing where it was absent or refused."""

    cell: dict[str, Any]
    settings: dict[str, Any]
    environment: dict[str, Any]
    arms: list[dict[str, Any]]


@dataclass(frozen=True)
class Benched:
    """`selfspec bench`.

    Attributes:
        quality: with --quality: what the texts of each arm are worth, with one value in a list for each prompt.
    """

    cells: list[BenchCell]
    quality: list[dict[str, Any]] | None = None


def bench(
    model: ModelToBench,
    arms: Arms,
    cells: Cells,
    measured: MeasuredParts,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Take at most `6GiB`, say: all arms stream from the disk what does not fit."),
    ] = None,
    to: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Results and report; cells that are there are not measured again.")
    ] = Path("bench"),
    report: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Make the report of that folder's results again, and stop.")
    ] = None,
    plots: Annotated[bool, typer.Option(help="Draw plots, as PNG files.")] = True,
    output: Output = "text",
) -> Benched:
    """Measure ways to decode side by side: `model.generate` with its own speed-ups, and selfspec with each draft.

    Each combination of workload, temperature, batch and context is a cell, in which the arms take turns. Results go to
    `results.jsonl`, from which `report.md` and the plots are made. Repeat an interrupted command to resume it.
    With --packed selfspec's arms alone run packed weights.

    Exit status 1 if any arm was refused because its greedy tokens differ from those of `model.generate`.
    """
    if report is None and not model.model:
        raise BenchError(NO_MODEL)

    from rich.markdown import Markdown

    from selfspec.tools.bench.plots import require_packages
    from selfspec.tools.bench.quality.record import QualityFile, figures_of, of_conditions
    from selfspec.tools.bench.quality.tables import sentence
    from selfspec.tools.bench.report import REPORT, overview, write_report
    from selfspec.tools.bench.results import FILE, ResultsFile

    if plots:
        require_packages()
    measured.check_quality()
    fresh = _measure(model, arms, cells, measured, memory, ResultsFile(to)) if report is None else None
    folder = report or to
    reported = ResultsFile(folder).cells()
    if not reported:
        raise BenchError(f"{folder} holds no results of selfspec bench (no cell in {FILE})")
    found = reported if fresh is None else fresh
    scored = QualityFile(folder).records()
    write_report(reported, folder, plots, scored)
    cells_found = [BenchCell(**each.to_dict()) for each in found]
    worth = [{**each.to_dict(), "figures": figures_of(each)} for each in scored]
    result = Benched(cells_found, worth or None)
    if output == "text":
        console().print(Markdown(overview(found)))
        for condition, records in of_conditions(scored).items():
            how = f"temperature {condition.temperature:g}" if condition.temperature else "greedy"
            console().print(f"Quality, {condition.workload}, {how}: {sentence(records)}", markup=False)
        console().print(f"{folder / REPORT} has the rest.", style="dim")
    refused = [f"{record.arm.name} ({each.cell.title})" for each in found for record in each.arms if record.refused]
    if refused and report is None:
        raise FailedRunError(RefusedError(f"greedy tokens differ: {'; '.join(refused)}"), result)
    return result


def _measure(
    model: ModelToBench, arms: Arms, cells: Cells, measured: MeasuredParts, memory: str | None, file: ResultsFile
) -> list[MeasuredCell]:
    parts = measured.within(memory)

    from selfspec.measure.prompts import read_workloads
    from selfspec.tools.bench.cell import with_prompts
    from selfspec.tools.bench.session import Session

    workloads = read_workloads(cells.workload)
    file.check()
    specs = arms.specs(model)
    # Arms that run packed weights pack a copy.
    checkpoint = replace(model, packed=False).load() if memory is None else _within(model, memory, specs, cells)
    name = "embedded" if model.model == DEMO else Path(model.model).name
    if memory is not None:
        name += f" within {memory}"
    timed = {each: asdict(parts)[each] for each in ("repeats", "warm_up", "peaks", "costs")}
    session = Session(name=name, place=model.place, model=checkpoint.model, specs=specs, **timed)
    prompted = with_prompts(cells.grid(list(workloads)), workloads, cells.prompts, checkpoint)
    with progress_bar("measuring") as progress:
        found = session.measure(prompted, file, StepBar(progress))
    if measured.quality:
        _score(name, checkpoint, specs, cells, workloads, measured, file)
    return found


def _score(
    name: str,
    checkpoint: Checkpoint,
    specs: Sequence[ArmSpec],
    cells: Cells,
    workloads: Mapping[str, Workload],
    measured: MeasuredParts,
    file: ResultsFile,
) -> None:
    """Score the texts of every arm, one row at a time, in each workload and at each temperature."""
    from selfspec.tools.bench.arms import make_arm
    from selfspec.tools.bench.quality.assess import Assessment
    from selfspec.tools.bench.quality.record import QualityFile
    from selfspec.tools.bench.quality.tasks import tasks_of

    assessment = Assessment(name, checkpoint.model, checkpoint.tokenizer, measured.run_code)
    limit = getattr(checkpoint.model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**20
    kept = QualityFile(file.folder)
    arms = [make_arm(spec, checkpoint.model) for spec in specs]
    for workload, temperature in product(workloads.values(), dict.fromkeys(cells.temperature)):
        most = limit - cells.max_new_tokens
        scored = measured.quality_prompts or cells.prompts
        tasks = tasks_of(workload, checkpoint.tokenizer, scored, most, min(cells.context))
        setup = assessment.setup(workload.name, temperature, cells.max_new_tokens, tasks)
        known = {record.arm for record in kept.records() if record.setup == setup}
        if {*specs} <= known:
            continue
        with progress_bar(f"answering {workload.name}, temperature {temperature:g}") as progress:
            bar = StepBar(progress)
            bar.begin((len({*specs} - known) + 1) * len(tasks))
            # Each is kept at once, so that an interrupted command resumes there.
            for record in assessment.assess(arms, tasks, setup, partial(bar.step, "texts"), known):
                kept.add([record])


def _within(model: ModelToBench, memory: str, specs: Sequence[ArmSpec], cells: Cells) -> Checkpoint:
    """The model within a budget, with room for the longest texts of the largest batch."""
    from selfspec.draft import Drafter
    from selfspec.model.checkpoint import Checkpoint, load_tokenizer

    drafts = [read_draft(spec.draft or "none") for spec in specs if spec.own]
    named = [draft for draft in drafts if isinstance(draft, Drafter)]
    if any(draft is not None and not isinstance(draft, Drafter) for draft in drafts):
        raise DraftConfigError("profiles are for models that are in memory whole; with --memory name another --draft")
    room = max(cells.batch) * (max(cells.context) + cells.max_new_tokens)
    tokenizer = load_tokenizer(model.place)
    spec = load_within(model, Budget(memory=memory, context=room), one_draft_in_fewer_bits(named))
    return Checkpoint(spec.model, tokenizer)
