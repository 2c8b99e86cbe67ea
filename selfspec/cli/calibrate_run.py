"""The work of `selfspec calibrate`, apart from its options: load, calibrate, write, print."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from transformers.utils import logging

from selfspec.cli.options import OutputFormat
from selfspec.cli.outcome import print_json
from selfspec.cli.terminal import StepBar, progress_bar
from selfspec.control.profile_place import default_file
from selfspec.control.profile_place import folder as default_folder
from selfspec.draft.along_path import PathDrafter
from selfspec.draft.named import PLAIN
from selfspec.environment import versions
from selfspec.files.writing import check_output_file, check_output_folder
from selfspec.measure.embedded import PROMPTS as DEMO_PROMPTS
from selfspec.measure.embedded import checkpoint_folder
from selfspec.measure.estimate import Estimate
from selfspec.model.checkpoint import DtypeName, find_device, load_checkpoint, read_config
from selfspec.runtime.kernels.packed import pack
from selfspec.tools.calibrate import Calibration, Chosen, Settings, calibrate
from selfspec.tools.calibrate.candidates import considered
from selfspec.tools.calibrate.run import Kind
from selfspec.tools.verify import PROMPTS


@dataclass(frozen=True)
class Job:
    """What the command line asked for, read and checked as far as that needs no model.

    Attributes:
        model: folder or hub name.
        drafters: paths to consider; None: every exit.
        prompts: texts to continue; None: the built-in ones.
        settings: how much is measured.
        to: where the profile goes; None: where `auto` finds it.
        dtype: what to compute in.
        device: where.
        threads: CPU threads; None: torch's own choice.
        packed: whether weights are laid out for oneDNN.
        output: what stdout gets.
    """

    model: str
    drafters: Sequence[PathDrafter] | None
    prompts: Sequence[str] | None
    settings: Settings
    to: Path | None
    dtype: DtypeName
    device: str
    threads: int | None
    packed: bool
    output: OutputFormat


def run(job: Job) -> None:
    """Calibrate, write the profile, print. An interrupt before the end writes nothing.

    Raises:
        SelfSpecError: the job cannot be done; nothing was written or printed.
        StorageError: the profile cannot be written; that is found out before anything is measured, where it can be.
    """
    logging.set_verbosity_error()
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    find_device(job.device)
    if job.to is None:
        check_output_folder(default_folder())
    else:
        check_output_file(job.to)
    # Weights may take minutes to load: what the configuration can tell is told before.
    considered(read_config(job.model).get_text_config(decoder=True).num_hidden_layers, job.drafters)
    checkpoint = load_checkpoint(job.model, job.dtype, job.device)
    if job.packed:
        pack(checkpoint.model)
    texts = job.prompts or _built_in(job.model)
    started = time.perf_counter()
    with progress_bar("calibrating") as progress:
        found = calibrate(
            checkpoint.model,
            [checkpoint.encode(text) for text in texts],
            job.drafters,
            job.settings,
            watch=StepBar(progress),
        )
    seconds = time.perf_counter() - started
    file = job.to or default_file(found.profile.setting)
    found.profile.save(file)
    if job.output == "json":
        print_json(_result(job, found, file, seconds))
    else:
        _print(job, found, file, seconds)


def _built_in(model: str) -> Sequence[str]:
    """Of the embedded model, which writes code only, the demonstration's."""
    folder = Path(model)
    return DEMO_PROMPTS if folder.is_dir() and folder.resolve() == checkpoint_folder().resolve() else PROMPTS


def _result(job: Job, found: Calibration, file: Path, seconds: float) -> dict[str, Any]:
    profile = found.profile
    return {
        "checkpoint": job.model,
        "profile": str(file),
        "setting": asdict(profile.setting),
        "greedy": asdict(profile.greedy),
        "sampled": asdict(profile.sampled),
        "report": dict(profile.report),
        "seconds": seconds,
        "versions": versions(),
    }


def _print(job: Job, found: Calibration, file: Path, seconds: float) -> None:
    console, setting = Console(highlight=False, markup=False), found.profile.setting
    threads = f", {setting.threads} threads" if setting.threads else ""
    console.print(f"{job.model}: {setting.device}, {setting.dtype}{threads}; {seconds:.0f} s")
    console.print()
    console.print(_costs(found))
    if found.in_batches:
        console.print()
        console.print(_in_batches(found))
        console.print()
    console.print(
        "c: a draft step. V(m): a target pass over m tokens. o: all else in a round. In plain steps "
        f"({found.costs.step_seconds.value * 1000:.2f} ms in the first table), medians. out of step: a plain round "
        "over rows at different places. alpha: acceptance rate, teacher-forced on the model's own text. speed-up: "
        "by the formula, at the best draft length; below, measured in turns with plain decoding.",
        style="dim",
    )
    for title, kind in (("greedy", found.greedy), (f"temperature {job.settings.temperature:g}", found.sampled)):
        console.print()
        console.print(_confirmed(title, kind))
        console.print(_sentence(kind.chosen), style="bold")
    console.print()
    auto = "auto" if job.to is None else f"auto:{file}"
    console.print(f'Profile: {file}. Use it: --draft {auto}, or selfspec.wrap(model, draft="{auto}").', soft_wrap=True)


def _costs(found: Calibration) -> Table:
    costs = found.costs
    kinds = (found.greedy, found.sampled)
    predictions = [{each.name: each for each in kind.predictions} for kind in kinds]
    widths = sorted({width for name, by_width in costs.verify.items() if name != PLAIN for width in by_width})
    table = Table(Column("draft", no_wrap=True))
    columns = ["c", *(f"V({width})" for width in widths), "o"]
    for kind in kinds:
        columns += [f"alpha, T={kind.temperature:g}", "speed-up"]
    for column in columns:
        table.add_column(column, justify="right")
    for name in costs.draft:
        cells = [f"{costs.draft[name].value:.3f}"]
        cells += [f"{costs.verify[name][width].value:.2f}" for width in widths]
        cells.append(f"{costs.overhead[name].value:.3f}")
        for by_name in predictions:
            if name in by_name:
                best = by_name[name].best
                cells += [f"{by_name[name].alpha:.3f}", f"{best.speedup:.2f} at {best.draft_length}"]
        table.add_row("look-up" if name == PLAIN else name, *cells)
    return table


def _in_batches(found: Calibration) -> Table:
    """What was chosen, in batches of other sizes: c and V are all that differs much."""
    widths = sorted({width for costs in found.in_batches for width in costs.verify[PLAIN]})
    table = Table(Column("rows", justify="right"), Column("plain step, ms", justify="right"))
    names = [name for name in found.in_batches[0].draft if name != PLAIN]
    for column in [*(f"c of {name}" for name in names), *(f"V({width})" for width in widths), "out of step"]:
        table.add_column(column, justify="right")
    for costs in found.in_batches:
        cells = [str(costs.batch), f"{costs.step_seconds.value * 1000:.2f}"]
        cells += [f"{costs.draft[name].value:.3f}" for name in names]
        cells += [f"{costs.verify[PLAIN][width].value:.2f}" for width in widths]
        table.add_row(*cells, "" if costs.out_of_step is None else f"{costs.out_of_step.value:.2f}")
    return table


def _confirmed(title: str, kind: Kind) -> Table:
    predicted = {each.name: each.best.speedup for each in kind.predictions}
    table = Table(Column(title, no_wrap=True))
    for column in ("speed-up", "interval", "predicted", "acceptance rate", "tokens a pass"):
        table.add_column(column, justify="right")
    in_batches = {f"{each.name}, {rows} rows": each for rows, each in kind.in_batches.items()}
    for name, each in ({each.name: each for each in kind.confirmed} | in_batches).items():
        table.add_row(
            name,
            f"{each.speedup.value:.2f}x",
            _interval(each.speedup),
            f"{predicted[name]:.2f}" if name in predicted else "",
            "-" if each.acceptance_rate is None else f"{each.acceptance_rate:.2f}",
            f"{each.mean_accepted_length:.2f}",
        )
    return table


def _interval(estimate: Estimate) -> str:
    return f"{estimate.low:.2f}-{estimate.high:.2f}"


def _sentence(chosen: Chosen) -> str:
    if chosen.draft == PLAIN:
        return "No draft was faster than plain decoding."
    limit = "" if chosen.most_rows is None else f" Batches of more than {chosen.most_rows} are decoded plainly."
    return f"Chosen: {chosen.draft}, {chosen.speedup[0]:.2f} times as fast as plain decoding.{limit}"
