"""Runs stages on a device. Each case is a run of the lab, so that a stage that was stopped goes on where it was."""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from device.models import DTYPE, Models, free_memory
from transformers.utils import logging

from selfspec.errors import DraftConfigError, SelfSpecError, UnsupportedModelError, UnsupportedOptionError
from selfspec.files.writing import whole
from selfspec.measure.embedded import DEMO
from selfspec.measure.environment import environment
from selfspec.measure.estimate import Estimate
from selfspec.model.checkpoint import find_device
from selfspec.tools.lab.report import escaped, markdown_table
from selfspec.tools.lab.runs import Row, Run, Runs
from selfspec.tools.lab.table import shown, spread

CANNOT, FAILED = "cannot: ", "FAILED: "
"""Beginnings of what stands in place of a figure: what the device lacks for it, and what went wrong."""

Rows = Mapping[str, Mapping[str, Estimate | float | str]]
"""Results of a case: figures by name, in rows by name. The name of a case's only row may be empty."""

_REFUSALS = tuple(each.__name__ for each in (DraftConfigError, UnsupportedModelError, UnsupportedOptionError))
_PROVENANCE = ("device", "driver", "cuda", "torch", "transformers", "selfspec", "commit", "python", "processor")
# A case that ended the process so often is not tried again.
_MOST_TRIALS = 2


@dataclass(frozen=True)
class Bench:
    """Device and models of all stages; in miniature everything is as small as it can be, to see that it runs."""

    device: torch.device
    miniature: bool
    models: Models


@dataclass(frozen=True)
class Stage:
    """Cases by name, each measured and kept by itself, and the minutes that they take on an H100, or where they run."""

    about: str
    minutes: float
    cases: Callable[[Bench], Mapping[str, Callable[[], Rows]]]
    on_cpus: bool = False


def main(stages: Mapping[str, Stage], words: Sequence[str] | None = None) -> int:
    """Run stages; return 0 where all that were asked for are complete and nothing failed, else 1.

    Raises SystemExit of status 2 where the command line asks for what cannot be.
    """
    parser = argparse.ArgumentParser(description="Measure selfspec on a CUDA device, in stages that can be resumed.")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="which to run; default: all, in order")
    parser.add_argument("--list", action="store_true", help="name the stages, and how long each takes")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="of the results")
    parser.add_argument("--device", default="cuda", metavar="NAME", help="cuda, cpu, or another that torch knows")
    parser.add_argument("--miniature", action="store_true", help="tiny models and few runs, to see that all runs")
    parser.add_argument(
        "--model", default=DEMO, metavar="FOLDER", help="a small trained llama to widen [default: demo]"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no case of a stage after so long")
    options = parser.parse_args(words)
    if options.list:
        for name, stage in stages.items():
            print(f"{name:10} {stage.minutes:3.0f} min  {stage.about}")
        return 0
    if unknown := [name for name in options.stages if name not in stages]:
        parser.error(f"there is no stage {unknown[0]!r}; choose from {', '.join(stages)}")
    if options.to is None:
        parser.error("name a folder for the results with --to")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu --miniature shows that everything runs")
    wanted = options.stages or [*stages]
    if options.device == "cpu" and not (options.miniature or all(stages[name].on_cpus for name in wanted)):
        parser.error("these models are too large for a CPU; add --miniature")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        device = find_device(options.device)
        bench = Bench(device, options.miniature, Models(device, options.miniature, options.model))
        runs = Runs(options.to)
        good = [_run(name, stages, bench, runs, options) for name in wanted]
    except SelfSpecError as error:
        parser.error(str(error))
    return int(not all(good))


def _run(name: str, stages: Mapping[str, Stage], bench: Bench, runs: Runs, options: argparse.Namespace) -> bool:
    """Run what is left of a stage; return whether it is complete and nothing of it failed."""
    started, good, around = time.monotonic(), True, _surroundings(bench.device)
    settings = {"on": options.device, "miniature": bench.miniature, "model": options.model, "dtype": str(DTYPE)[6:]}
    for case, measure in stages[name].cases(bench).items():
        run = Run("device", {**settings, "stage": name, "case": case})
        if run not in runs:
            if time.monotonic() - started > 60 * options.minutes:
                print(f"{name}: not complete; run the same command to resume", flush=True)
                return False
            trials = [Run("begun", {**run.under, "trial": number}) for number in range(_MOST_TRIALS)]
            left = [trial for trial in trials if trial not in runs]
            runs.keep(left[0].rows([{}], {}) if left else [])
            runs.find_out([run], partial(_found, measure if left else _ended), around)
            # What a failed case held on to is reachable no more.
            free_memory()
            with whole(options.to / "summary.md") as draft:
                draft.write_text(summary(stages, runs.measured("device")), encoding="utf-8")
        wrong = [said for _, said in _wrong(runs[run])]
        failed = [said for said in wrong if not said.startswith(CANNOT)]
        print(f"{name}: {case}: {(failed or wrong or ['done'])[0]}", flush=True)
        good = good and not failed
        if failed and not _is_alive(bench.device):
            print("the device answers this process no more", flush=True)
            return False
    return good


def _found(measure: Callable[[], Rows], _: Sequence[Run]) -> list[list[Row]]:
    """Measure a case; its figures become columns, those with intervals as in every table of the lab."""
    found = []
    for name, figures in measure().items():
        row: Row = {"row": name, "figures": [*figures]}
        for figure, value in figures.items():
            row |= spread(figure, value) if isinstance(value, Estimate) else {figure: value}
        found.append(row)
    return [found]


def _ended() -> Rows:
    raise RuntimeError(f"the process ended {_MOST_TRIALS} times while it was measured")


def _wrong(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield what has no figure, with the reason: what the device cannot, or what failed."""
    for row in rows:
        for name, said in row.items():
            if name == "error":
                yield "", (CANNOT if said.startswith(_REFUSALS) else FAILED) + said
            elif isinstance(said, str) and said.startswith((CANNOT, FAILED)):
                yield ", ".join(filter(None, (row["row"], name))), said


def _is_alive(device: torch.device) -> bool:
    """Return whether the device still works; after some errors it does not until the process ends."""
    try:
        return torch.zeros(1, device=device).item() == 0
    except RuntimeError:
        return False


def summary(stages: Mapping[str, Stage], rows: Sequence[Row]) -> str:
    """Return a page: what it ran on, a table for each stage, and what did not work."""
    made = dict.fromkeys(", ".join(f"{name} {row[name]}" for name in _PROVENANCE if row.get(name)) for row in rows)
    parts = ["# On a device", *(f"- {each}" for each in made)]
    if any(row["miniature"] for row in rows):
        parts.append("In miniature: that it runs is all that these figures show.")
    parts.append("Medians, with their intervals in brackets. `selfspec.measure` says what c, V and o are.")
    reasons: dict[str, list[str]] = {}
    for stage, each in stages.items():
        own = [row for row in rows if row["stage"] == stage]
        parts += [f"## {stage}", f"{each.about}."]
        columns = list(dict.fromkeys(name for row in own for name in row.get("figures", ())))
        lines = []
        for row in own:
            titles = [row["case"], row.get("row", "")]
            cells = [shown(row, name).partition(": ")[0] for name in columns]
            lines.append([": ".join(filter(None, titles)), *cells])
            for where, said in _wrong([row]):
                reasons.setdefault(f"{stage}: {said}", []).append(", ".join(filter(None, (row["case"], where))))
        parts.append(markdown_table(["case", *columns], lines) if own else "Not run.")
    parts += ["## What did not work"]
    parts += [f"- {escaped(said)} ({escaped('; '.join(places))})" for said, places in reasons.items()] or ["Nothing."]
    return "\n\n".join(parts) + "\n"


def _surroundings(device: torch.device) -> Row:
    """Return versions of what runs, and what it runs on."""
    found: Row = {**environment(device)}
    if device.type == "cuda":
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
        memory = torch.cuda.get_device_properties(device).total_memory
        found |= {"cuda": torch.version.cuda, "driver": said[0] if said else None, "device_memory": memory}
    return found
