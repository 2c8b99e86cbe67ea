"""The work of `selfspec bench`, apart from its options: load, measure, report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging

from selfspec.cli.bench_report import print_overview, summary, write_report
from selfspec.cli.options import OutputFormat, read_draft
from selfspec.cli.outcome import FailedRunError, print_json
from selfspec.cli.terminal import progress_bar
from selfspec.draft import Drafter
from selfspec.errors import DraftConfigError, PromptError
from selfspec.measure.embedded import checkpoint_folder
from selfspec.measure.prompts import Workload
from selfspec.model.checkpoint import Checkpoint, DtypeName, find_device, load_checkpoint, read_config
from selfspec.runtime.named import RuntimeName
from selfspec.tools.bench import plots
from selfspec.tools.bench.arm import ArmSpec, Kind
from selfspec.tools.bench.arms import arm_specs
from selfspec.tools.bench.bar import Bar
from selfspec.tools.bench.cell import Cell, grid
from selfspec.tools.bench.results_file import MeasuredCell, ResultsFile
from selfspec.tools.bench.session import Plan, Session, Subject

_EMBEDDED = "embedded"


@dataclass(frozen=True)
class Job:
    """What the command line asked for.

    Attributes:
        model: folder or hub name; None: the embedded checkpoint.
        drafts: of selfspec's drafting arms; None: chosen from the depth.
        draft_length: tokens that they draft each round; None: as many as pay.
        rules: acceptance rules, by name; None: selfspec's default.
        arms: kinds besides `model.generate` and plain; None: those that start at once on the device.
        workloads: where prompts come from.
        temperatures: 0 decodes greedily.
        batches: rows of a call.
        contexts: tokens of a prompt.
        exit_layer: of transformers' own early exit; None: chosen from the depth.
        exit_length: tokens it drafts each round.
        prompts: of each workload.
        max_new_tokens: tokens of each text.
        plan: what is measured in each cell.
        plots: whether plots are drawn.
        folder: where results go.
        dtype: what to compute in.
        device: where.
        threads: CPU threads; None: torch's own choice.
        packed: whether selfspec's arms run packed weights.
        runtime: how they run passes, by name.
        output: what stdout gets.
    """

    model: str | None
    drafts: Sequence[str] | None
    draft_length: int | None
    rules: Sequence[str | None]
    arms: Sequence[str] | None
    workloads: Sequence[Workload]
    temperatures: Sequence[float]
    batches: Sequence[int]
    contexts: Sequence[int]
    exit_layer: int | None
    exit_length: int
    prompts: int
    max_new_tokens: int
    plan: Plan
    plots: bool
    folder: Path
    dtype: DtypeName
    device: str
    threads: int | None
    packed: bool
    runtime: str
    output: OutputFormat


class RefusedError(Exception):
    """Greedy tokens of an arm differ from those of `model.generate`, by more than rounding explains."""


def run(job: Job) -> None:
    """Measure, report and print.

    Raises:
        SelfSpecError: the job cannot be done; nothing was measured.
        FailedRunError: an arm was refused; everything else was measured and reported.
    """
    logging.set_verbosity_error()
    if job.plots:
        plots.require_packages()
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    device = find_device(job.device)
    file = ResultsFile(job.folder)
    file.check()
    place = str(checkpoint_folder()) if job.model is None else job.model
    specs = _specs(job, place, device)
    checkpoint = load_checkpoint(place, job.dtype, str(device))
    name = _EMBEDDED if job.model is None else Path(job.model).name
    session = Session(Subject(name, place, checkpoint.model), specs, job.plan, file)
    cells = _cells(job, checkpoint)
    with progress_bar("measuring") as progress:
        measured = session.measure(cells, Bar(progress, len(cells)))
    write_report(file.cells(), job.folder, job.plots)
    if job.output == "text":
        print_overview(measured, job.folder)
    refused = _refused(measured)
    if refused:
        raise FailedRunError(RefusedError(f"greedy tokens differ: {'; '.join(refused)}"), summary(measured))
    if job.output == "json":
        print_json(summary(measured))


def _specs(job: Job, place: str, device: torch.device) -> list[ArmSpec]:
    """The arms; what the configuration can tell of them is told before weights are loaded.

    Raises:
        DraftConfigError: a draft does not fit the depth.
    """
    depth = read_config(place).get_text_config(decoder=True).num_hidden_layers
    third = max(depth // 3, 1)
    exit_layer = third if job.exit_layer is None else job.exit_layer
    drafts = [f"exit:{third}", "lookup", f"lookup+exit:{third}"] if job.drafts is None else list(job.drafts)
    if job.arms is None:
        kinds = [Kind.LOOK_UP, Kind.EARLY_EXIT, Kind.DRAFT] + ([Kind.STATIC] if device.type == "cuda" else [])
    else:
        kinds = [Kind(arm) for arm in job.arms]
    if Kind.EARLY_EXIT in kinds and exit_layer >= depth:
        raise DraftConfigError(
            f"--exit {exit_layer} is out of range: the model has {depth} layers; choose 1..{depth - 1}"
        )
    drafts = [draft.strip() for draft in drafts]
    own = (job.packed, RuntimeName(job.runtime))
    specs = arm_specs(kinds, drafts, job.draft_length, job.rules, exit_layer, job.exit_length, *own)
    for spec in specs:
        if spec.draft is None:
            continue
        drafter = read_draft(spec.draft)
        if isinstance(drafter, Drafter):
            drafter.check(depth)
        if drafter is None:
            raise DraftConfigError("plain decoding is always among the arms; give --draft exit:E or another draft")
    return specs


def _cells(job: Job, checkpoint: Checkpoint) -> dict[Cell, list[Tensor]]:
    """The cells with their prompts.

    Raises:
        PromptError: prompt and text together are longer than the model's context.
    """
    limit = getattr(checkpoint.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = max(job.contexts) + job.max_new_tokens
    if limit is not None and longest > limit:
        raise PromptError(
            f"a prompt of {max(job.contexts)} and {job.max_new_tokens} new tokens exceed the model's context of "
            f"{limit}; give a smaller --context or --max-new-tokens"
        )
    workloads = {workload.name: workload for workload in job.workloads}
    device, tokenizer = checkpoint.model.device, checkpoint.tokenizer
    cells = grid(list(workloads), job.temperatures, job.batches, job.contexts, job.max_new_tokens)
    return {
        cell: [
            prompts.to(device)
            for prompts in workloads[cell.workload].prompts(tokenizer, job.prompts, cell.batch, cell.context)
        ]
        for cell in cells
    }


def _refused(measured: Sequence[MeasuredCell]) -> list[str]:
    return [f"{record.arm.name} ({each.cell.title})" for each in measured for record in each.arms if record.refused]
