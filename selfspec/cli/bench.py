"""`selfspec bench`: ways to decode side by side on your own checkpoint, and a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from selfspec.cli.options import DraftLength, ModelOptions, Output, Repeats, read_draft
from selfspec.cli.outcome import FailedCheckError, FailedRunError, print_json
from selfspec.cli.terminal import console, progress_bar
from selfspec.errors import BenchError, DraftConfigError
from selfspec.measure.embedded import DEMO

if TYPE_CHECKING:
    from selfspec.tools.bench.arm import ArmSpec
    from selfspec.tools.bench.results_file import MeasuredCell


class ExtraArm(StrEnum):
    """What `--arm` takes."""

    STATIC = "static"
    LOOK_UP = "lookup"
    EARLY_EXIT = "early-exit"
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
            "selfspec's of the same layer and length; `draft`: each --draft. Default: all, `static` on a GPU only.",
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
    accept: Annotated[
        list[str] | None, typer.Option(metavar="RULE", help="Acceptance rule of the drafts; may be repeated.")
    ] = None
    runtime: Annotated[
        Literal["eager", "traced", "compiled", "graphs"],
        typer.Option(
            metavar="RUNTIME",
            help="How selfspec runs passes: `eager`, `traced`, `compiled` (with a larger --warm-up: each kind of pass "
            "compiles for some ten seconds) or `graphs`, on a CUDA device only.",
        ),
    ] = "traced"
    exit_layer: Annotated[
        int | None, typer.Option(min=1, help="Exit of `early-exit`; default: a third of the depth.")
    ] = None
    exit_length: Annotated[int, typer.Option(min=1, help="Tokens that `early-exit` drafts a round.")] = 3

    def specs(self, model: ModelOptions) -> list[ArmSpec]:
        """The arms, checked as far as the configuration of the model allows.

        Raises:
            DraftConfigError: a draft does not fit the depth.
        """
        from selfspec.draft import Drafter
        from selfspec.model.checkpoint import find_device
        from selfspec.runtime.named import RuntimeName
        from selfspec.tools.bench.arm import ArmKind
        from selfspec.tools.bench.arms import arm_specs

        depth = model.prepare()
        third = max(depth // 3, 1)
        exit_layer = third if self.exit_layer is None else self.exit_layer
        drafts = [f"exit:{third}", "lookup", f"lookup+exit:{third}"] if self.draft is None else self.draft
        kinds = [ArmKind.LOOK_UP, ArmKind.EARLY_EXIT, ArmKind.DRAFT]
        if self.arm is not None:
            kinds = [ArmKind(arm.value) for arm in self.arm]
        elif find_device(model.device).type == "cuda":
            kinds.append(ArmKind.STATIC)
        if ArmKind.EARLY_EXIT in kinds and exit_layer >= depth:
            raise DraftConfigError(
                f"--exit-layer {exit_layer} is out of range: the model has {depth} layers; choose 1..{depth - 1}"
            )
        specs = arm_specs(
            kinds,
            [draft.strip() for draft in drafts],
            self.draft_length,
            self.accept or [None],
            exit_layer,
            self.exit_length,
            model.packed,
            RuntimeName(self.runtime),
        )
        for spec in specs:
            if spec.draft is None:
                continue
            drafter = read_draft(spec.draft)
            if isinstance(drafter, Drafter):
                drafter.check(depth)
            if drafter is None:
                raise DraftConfigError("plain decoding is always among the arms; give --draft exit:E or another draft")
        return specs


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


@dataclass(frozen=True, kw_only=True)
class MeasuredParts:
    """What is measured in each cell."""

    repeats: Repeats = 5
    warm_up: Annotated[int, typer.Option(min=1, help="Decode all prompts N times before timing.")] = 3
    memory: Annotated[
        bool, typer.Option(help="Measure peak memory, each arm in its own process, once per batch and context.")
    ] = True
    costs: Annotated[
        bool, typer.Option(help="Time the parts of a round by themselves, and predict speed-ups from them.")
    ] = True


def bench(
    model: ModelToBench,
    arms: Arms,
    cells: Cells,
    measured: MeasuredParts,
    to: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Results and report; cells that are there are not measured again.")
    ] = Path("bench"),
    report: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Make the report of that folder's results again, and stop.")
    ] = None,
    plots: Annotated[bool, typer.Option(help="Draw plots, as PNG files.")] = True,
    output: Output = "text",
) -> None:
    """Measure ways to decode side by side: `model.generate` with its own speed-ups, and selfspec with each draft.

    Each combination of workload, temperature, batch and context is a cell, in which the arms take turns. Results go to
    `results.jsonl`, from which `report.md` and the plots are made. Repeat an interrupted command to resume it.
    With --packed selfspec's arms alone run packed weights.

    Exit status 1 if any arm was refused because its greedy tokens differ from those of `model.generate`.
    """
    if report is None and not model.model:
        raise BenchError(f"name a model: a checkpoint folder, a hub name, or {DEMO}")

    from rich.markdown import Markdown

    from selfspec.tools.bench.plots import require_packages
    from selfspec.tools.bench.report import REPORT, overview, write_report
    from selfspec.tools.bench.results_file import FILE, ResultsFile
    from selfspec.tools.bench.summary import summary

    if plots:
        require_packages()
    if report is None:
        found = _measure(model, arms, cells, measured, to)
        folder, reported = to, ResultsFile(to).cells()
    else:
        folder, found = report, ResultsFile(report).cells()
        reported = found
        if not found:
            raise BenchError(f"{report} holds no results of selfspec bench (no cell in {FILE})")
    write_report(reported, folder, plots)
    if output == "text":
        console().print(Markdown(overview(found)))
        console().print(f"{folder / REPORT} has the rest.", style="dim")
    refused = [f"{record.arm.name} ({each.cell.title})" for each in found for record in each.arms if record.refused]
    if refused and report is None:
        raise FailedRunError(RefusedError(f"greedy tokens differ: {'; '.join(refused)}"), summary(found))
    if output == "json":
        print_json(summary(found))


def _measure(model: ModelToBench, arms: Arms, cells: Cells, measured: MeasuredParts, to: Path) -> list[MeasuredCell]:
    from selfspec.measure.prompts import read_workloads
    from selfspec.tools.bench.bar import Bar
    from selfspec.tools.bench.cell import grid, with_prompts
    from selfspec.tools.bench.results_file import ResultsFile
    from selfspec.tools.bench.session import BenchedModel, BenchPlan, Session

    workloads = read_workloads(cells.workload)
    file = ResultsFile(to)
    file.check()
    specs = arms.specs(model)
    # Arms that run packed weights pack a copy.
    checkpoint = replace(model, packed=False).load()
    name = "embedded" if model.model == DEMO else Path(model.model).name
    session = Session(BenchedModel(name, model.place, checkpoint.model), specs, BenchPlan(**asdict(measured)), file)
    conditions = grid(list(workloads), cells.temperature, cells.batch, cells.context, cells.max_new_tokens)
    prompted = with_prompts(conditions, workloads, cells.prompts, checkpoint)
    with progress_bar("measuring") as progress:
        return session.measure(prompted, Bar(progress, len(prompted)))
