"""The work of `selfspec ablate`, apart from its options: work on the study, write the report, print the best of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from selfspec.cli.options import OutputFormat
from selfspec.cli.outcome import print_json
from selfspec.cli.terminal import progress_bar
from selfspec.environment import versions
from selfspec.files.writing import check_output_folder
from selfspec.tools.studies.report.compare import Comparison, compare
from selfspec.tools.studies.report.panels import Panel, panels
from selfspec.tools.studies.report.write import write_report
from selfspec.tools.studies.requirements import REPORT, WORK, require_packages
from selfspec.tools.studies.run import Finding, run_study
from selfspec.tools.studies.study import Study, read_study

_SHOWN = 8
_COLUMNS = {
    "draft_length": "length",
    "alpha": "alpha",
    "c": "c",
    "predicted_speedup": "predicted",
    "measured_speedup_median": "measured",
    "exact": "exact",
}


@dataclass(frozen=True)
class Job:
    """What the command line asked for.

    Attributes:
        file: of the study; None: the options declare it.
        declared: what options say, by name.
        to: folder; None: the study's name.
        storage: URL; None: a journal file in the folder.
        device: where to compute.
        threads: CPU threads; None: torch's own choice.
        output: what stdout gets.
    """

    file: Path | None
    declared: Mapping[str, Any]
    to: Path | None
    storage: str | None
    device: str
    threads: int | None
    output: OutputFormat


class Told(Protocol):
    """Is told how far a study has come."""

    def __call__(self, done: int, known: int) -> None:
        """So many of so many points are found out."""


def run(job: Job) -> None:
    """Work on a study until it is done, and report.

    Raises:
        SelfSpecError: the study cannot be done as declared.
        StorageError: its storage or its folder cannot be used; what was finished is kept.
    """
    prepare(job.threads)
    require_packages((*WORK, *REPORT))
    study = _study(job)
    to = job.to or Path(study.name)
    check_output_folder(to)
    with shown_progress("studying") as told:
        finding = run_study(study, to, job.storage, job.device, told)
    files = write_report(finding, to)
    if job.output == "json":
        print_json(_summary(finding, files))
        return
    for panel in panels(finding):
        _print_panel(panel)
    for result in finding.failed:
        print(f"failed: {dict(result.point.place)}: {result.error}")
    print(f"{len(finding.results)} points, {len(finding.failed)} failed; the report is in {to}")


def run_compare(first: Path, second: Path, output: OutputFormat) -> None:
    """Print two studies side by side.

    Raises:
        StudyError: they cannot be compared.
    """
    found = compare(first, second)
    if output == "json":
        print_json({**found.to_dict(), "versions": versions()})
    else:
        _print_comparison(found)


def prepare(threads: int | None) -> None:
    """Quiet `transformers`, and set the threads."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)


@contextmanager
def shown_progress(verb: str) -> Iterator[Told]:
    """A bar that follows a count."""
    with progress_bar(verb) as bar:
        task = bar.add_task("", total=None)

        def told(done: int, known: int) -> None:
            bar.update(task, completed=done, total=known, description=f"{done} of {known}")

        yield told


def _study(job: Job) -> Study:
    if job.file is None:
        return Study.of(job.declared, "the command line")
    return read_study(job.file, job.declared)


def _summary(finding: Finding, files: Sequence[Path]) -> dict[str, Any]:
    return {
        "study": finding.study.to_dict(),
        "points": len(finding.results),
        "failed": [{"place": dict(each.point.place), "error": each.error} for each in finding.failed],
        "best": [_ranked(panel)[0] for panel in panels(finding) if panel.best],
        "files": [str(file) for file in files],
        "versions": versions(),
    }


def _ranked(panel: Panel) -> list[dict[str, Any]]:
    return sorted(panel.best, key=lambda row: -row["predicted_speedup"])


def _print_panel(panel: Panel) -> None:
    table = Table(title=panel.title, title_justify="left")
    table.add_column("draft", overflow="fold", min_width=16)
    for name in _COLUMNS.values():
        table.add_column(name, justify="right")
    for row in _ranked(panel)[:_SHOWN]:
        table.add_row(row["draft"], *(_cell(row.get(name)) for name in _COLUMNS))
    Console(highlight=False, markup=False).print(table)


def _print_comparison(found: Comparison) -> None:
    table = Table(title=f"a: {found.names[0]}, b: {found.names[1]}", title_justify="left")
    for name in ("draft", "workload", "temperature"):
        table.add_column(name)
    figures = ("alpha", "c", "predicted_speedup", "measured_speedup_median")
    for figure in figures:
        for side in "ab":
            table.add_column(f"{figure.replace('_', ' ')} {side}", justify="right")
    for row in found.rows:
        cells = [_cell(row[f"{figure}_{side}"]) for figure in figures for side in "ab"]
        table.add_row(row["draft"], row["workload"], f"{row['temperature']:g}", *cells)
    Console(highlight=False, markup=False).print(table)
    if any(found.alone):
        print(f"only in a: {found.alone[0]} drafts; only in b: {found.alone[1]}")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else f"{value:.2f}"
