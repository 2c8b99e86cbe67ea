"""The command line: chooses stages, device and the folder of results."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from device.figure import Figure, lacking
from device.models import DTYPE, Models, free_memory
from device.results import CaseRecord, Settings, StageFile, StageRecord, read_all, surroundings
from device.stage import Bench, Case, Stage
from device.stages import STAGES
from device.summary import summary
from transformers.utils import logging

from selfspec.errors import SelfSpecError
from selfspec.files.writing import check_output_folder, whole
from selfspec.measure.embedded import DEMO
from selfspec.model.checkpoint import find_device

_NAMES = [stage.name for stage in STAGES]
# A case that ended the process so often is not tried again.
_MOST_TRIALS = 2


def main(words: Sequence[str] | None = None) -> int:
    """Run stages.

    Args:
        words: of the command line; None: those that the process was given.

    Returns:
        0: all stages that were asked for are complete, and nothing failed. 1: not so.

    Raises:
        SystemExit: of status 2, where the command line asks for what cannot be.
    """
    parser = _parser()
    options = parser.parse_args(words)
    if options.list:
        for stage in STAGES:
            print(f"{stage.name:10} {stage.minutes:3.0f} min  {stage.about}")
        return 0
    unknown = [name for name in options.stages if name not in _NAMES]
    if unknown:
        parser.error(f"there is no stage {unknown[0]!r}; choose from {', '.join(_NAMES)}")
    if options.to is None:
        parser.error("name a folder for the results with --to")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu --miniature shows that everything runs")
    if options.device == "cpu" and not options.miniature:
        parser.error("these models are too large for a CPU; add --miniature")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        device = find_device(options.device)
        check_output_folder(options.to)
        bench = Bench(device, options.miniature, Models(device, options.miniature, options.model))
        settings = Settings(options.device, options.miniature, options.model, str(DTYPE).removeprefix("torch."))
        chosen = [stage for stage in STAGES if not options.stages or stage.name in options.stages]
        # Before anything is measured: what is there must be readable, and of the same settings.
        for stage in chosen:
            if not options.again:
                StageFile(options.to, stage.name).read(settings)
        good = [_run(stage, bench, settings, options) for stage in chosen]
    except SelfSpecError as error:
        parser.error(str(error))
    return int(not all(good))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure selfspec on a CUDA device, in stages that can be resumed.")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="which to run; default: all, in order")
    parser.add_argument("--list", action="store_true", help="name the stages, and how long each takes")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="of the results")
    parser.add_argument("--device", default="cuda", metavar="NAME", help="cuda, cpu, or another that torch knows")
    parser.add_argument("--miniature", action="store_true", help="tiny models and few runs, to see that all runs")
    parser.add_argument(
        "--model", default=DEMO, metavar="FOLDER", help="of a small trained llama to widen; default: the embedded one"
    )
    parser.add_argument("--again", action="store_true", help="forget what there is of these stages")
    parser.add_argument(
        "--minutes", type=float, default=9.0, metavar="N", help="begin no case of a stage after so long"
    )
    return parser


def _run(stage: Stage, bench: Bench, settings: Settings, options: argparse.Namespace) -> bool:
    """Run what is left of a stage; whether it is complete and nothing of it failed."""
    file = StageFile(options.to, stage.name)
    if options.again:
        file.forget()
    record = file.read(settings)
    if not file.is_complete:
        complete = _measure(stage, bench, record, file, options.minutes)
        if complete:
            file.save(record, complete=True)
        _summarize(options.to)
        if not complete:
            print(f"{stage.name}: not complete; run the same command to resume", flush=True)
            return False
    failed = [name for name, case in record.cases.items() if case.failed]
    print(f"{stage.name}: complete" + (f"; failed: {', '.join(failed)}" if failed else ""), flush=True)
    return not failed


def _measure(stage: Stage, bench: Bench, record: StageRecord, file: StageFile, minutes: float) -> bool:
    """Measure the cases that are left; whether none are."""
    started = time.monotonic()
    around = surroundings(bench.device, DTYPE)
    for case in stage.cases(bench):
        if case.name in record.cases:
            continue
        if time.monotonic() - started > 60 * minutes:
            return False
        begun = record.begun.get(case.name, 0)
        if begun >= _MOST_TRIALS:
            reason = Figure(failed=f"the process ended {begun} times while it was measured")
            record.cases[case.name] = CaseRecord(0.0, around, reason=reason)
        else:
            record.begun[case.name] = begun + 1
            file.save(record)
            record.cases[case.name] = _measured(case, around)
        file.save(record)
        _tell(stage, case, record.cases[case.name])
        if record.cases[case.name].failed and not _is_alive(bench.device):
            print("the device answers this process no more", flush=True)
            return False
    return True


def _measured(case: Case, around: dict[str, Any]) -> CaseRecord:
    started = time.monotonic()
    try:
        rows = {row: dict(figures) for row, figures in case.measure().items()}
        reason = None
    except Exception as error:
        rows, reason = {}, lacking(error)
    seconds = time.monotonic() - started
    # What a failed case held on to is reachable no more.
    free_memory()
    return CaseRecord(seconds, around, rows, reason)


def _is_alive(device: torch.device) -> bool:
    """Return whether the device still works; after some errors it does not until the process ends."""
    try:
        return torch.zeros(1, device=device).item() == 0
    except RuntimeError:
        return False


def _tell(stage: Stage, case: Case, found: CaseRecord) -> None:
    wrong = [figure.failed or figure.cannot for figure in found.all_figures if figure.failed or figure.cannot]
    outcome = "failed" if found.failed else "cannot" if found.reason is not None else "done"
    why = f": {wrong[0]}" if wrong else ""
    print(f"{stage.name}: {case.name}: {outcome} in {found.seconds:.0f} s{why}", flush=True)


def _summarize(folder: Path) -> None:
    with whole(folder / "summary.md") as draft:
        draft.write_text(summary(STAGES, read_all(folder, _NAMES)), encoding="utf-8")
