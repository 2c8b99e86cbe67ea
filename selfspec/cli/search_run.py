"""The work of `selfspec search`, apart from its options: search with a progress bar, save and print what was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from selfspec.cli.ablate_run import prepare, shown_progress
from selfspec.cli.options import OutputFormat
from selfspec.cli.outcome import print_json
from selfspec.environment import versions
from selfspec.files.writing import check_output_file, check_output_folder
from selfspec.tools.studies.models import check_inputs, loader
from selfspec.tools.studies.requirements import require_packages
from selfspec.tools.studies.search import Found, SearchPlan, find, save
from selfspec.tools.studies.study import Study


@dataclass(frozen=True)
class Job:
    """What the command line asked for.

    Attributes:
        declared: model, texts and pricing, as a study has them.
        plan: the budget.
        to: file to write.
        storage: folder or URL to keep the search in; None: nowhere.
        device: where to compute.
        threads: CPU threads; None: torch's own choice.
        output: what stdout gets.
    """

    declared: Mapping[str, Any]
    plan: SearchPlan
    to: Path
    storage: str | None
    device: str
    threads: int | None
    output: OutputFormat


def run(job: Job) -> None:
    """Search, save and print.

    Raises:
        SelfSpecError: the search cannot be done as asked.
        StorageError: its storage went away, or the file cannot be written.
    """
    prepare(job.threads)
    require_packages()
    study = Study.of({**job.declared, "draft_lengths": list(job.plan.draft_lengths), "reach": 1}, "the command line")
    check_output_file(job.to)
    if job.storage is not None and "://" not in job.storage:
        check_output_folder(Path(job.storage))
    check_inputs(study)
    studied = loader(study, job.device)(study.models[0])
    with shown_progress("searching") as told:
        found = find(studied, study, job.plan, job.storage, lambda done: told(done, job.plan.evaluations))
    about = {"plan": asdict(job.plan), "workload": study.workloads[0], "temperature": study.temperatures[0]}
    about |= {"evaluations": len(found.scores), "pricing": study.pricing}
    save(found, studied, job.to, about)
    if job.output == "json":
        print_json({**found.to_dict(), "file": str(job.to), **about, "versions": versions()})
    else:
        _print(found, job.to)


def _print(found: Found, to: Path) -> None:
    table = Table(title="Acceptance against cost: what nothing beats", title_justify="left")
    for name in ("attention", "MLP"):
        table.add_column(name)
    for name in ("acceptance", "c", "draft length", "predicted speed-up"):
        table.add_column(name, justify="right")
    for score in found.front:
        row = score.to_dict()
        layers = (",".join(map(str, row[part])) for part in ("attention", "mlp"))
        figures = (f"{row['alpha']:.3f}", f"{row['cost']:.3f}", str(row["draft_length"]), f"{row['speedup']:.3f}")
        table.add_row(*layers, *figures, style="bold" if score == found.best else None)
    Console(highlight=False, markup=False).print(table)
    print(f"{len(found.scores)} sets evaluated; the best is in {to}: --draft skip-file:{to}")
