"""`selfspec ablate`: which layers can a model do without, and what is it worth?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from selfspec.cli.options import DtypeOption, Machine, Output, prepare_process
from selfspec.cli.outcome import print_json
from selfspec.cli.terminal import console, counting_bar, figures_table
from selfspec.errors import StudyError
from selfspec.measure.embedded import DEMO

if TYPE_CHECKING:
    from selfspec.tools.studies.report.compare import SideBySide
    from selfspec.tools.studies.report.panels import Panel

_SHOWN = 8
_COLUMNS = {
    "draft_length": "length",
    "alpha": "alpha",
    "c": "c",
    "predicted_speedup": "predicted",
    "measured_speedup_median": "measured",
    "exact": "exact",
}

DraftLengths = Annotated[
    list[int] | None, typer.Option("--draft-length", help="Draft length to choose from; may be repeated.")
]
Storage = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Database that workers share, e.g. postgresql://user@host/name; default: a file."),
]


@dataclass(frozen=True, kw_only=True)
class TextsAndCosts:
    """Texts and costs."""

    texts: Annotated[int | None, typer.Option(help="Texts of each workload.")] = None
    prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of each prompt.")] = None
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens that the model adds to each.")] = None
    pricing: Annotated[
        Literal["measured", "weights"] | None,
        typer.Option(help="Costs as `measured` here, or by the `weights` that a step reads."),
    ] = None
    dtype: Annotated[DtypeOption | None, typer.Option(metavar="DTYPE", help="Compute in it; default: float32.")] = None


@dataclass(frozen=True, kw_only=True)
class Lists:
    """Lists of the study: each may be repeated."""

    models: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODEL", help=f"A checkpoint folder, a hub name, or `{DEMO}`."),
    ] = None
    drafts: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            metavar="DRAFT",
            help="`exits`, `layers`, `sublayers`, `random:4x20` (20 sets of 4 sublayers), `heads:FOLDER`, or a draft.",
        ),
    ] = None
    workloads: Annotated[
        list[str] | None,
        typer.Option("--workload", metavar="NAME=FILE", help="Prompts, as of `selfspec bench`; or `demo`."),
    ] = None
    temperatures: Annotated[list[float] | None, typer.Option("--temperature", help="0: greedy decoding.")] = None
    accept: Annotated[
        list[str] | None, typer.Option(metavar="RULE", help="Acceptance rule of the drafts to confirm.")
    ] = None
    draft_lengths: DraftLengths = None
    seeds: Annotated[list[int] | None, typer.Option("--seed", help="Seed of sampled texts.")] = None


@dataclass(frozen=True, kw_only=True)
class Estimates(TextsAndCosts):
    """Texts, estimates and costs."""

    reach: Annotated[
        int | None, typer.Option(help="Positions of a draft that estimates tell apart; each costs a pass.")
    ] = None
    confirm: Annotated[
        int | None, typer.Option(help="Drafts of each text and temperature to confirm by generation.")
    ] = None


def ablate(
    lists: Lists,
    estimates: Estimates,
    machine: Machine,
    study: Annotated[
        Path | None, typer.Argument(metavar="STUDY", help="A study as TOML or YAML; options override it.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Study and report go there; default: the name of the study.")
    ] = None,
    storage: Storage = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="Show two finished studies side by side, and stop.")
    ] = None,
    output: Output = "text",
) -> None:
    """Study drafts of all kinds on models and texts, and write tables and pictures.

    Acceptance is estimated for every draft by teacher forcing, many drafts at once; a sample is confirmed by real
    generation. Repeat an interrupted command to resume it; several at once share the work.
    """
    if compare is not None:
        _compare(*compare, output == "json")
        return
    declared = given({**asdict(lists), **asdict(estimates)})
    if study is None and not declared:
        raise StudyError(f"there is nothing to study; give a study file, or --model {DEMO} and what to draft with")

    from selfspec.environment import versions
    from selfspec.files.writing import check_output_folder
    from selfspec.tools.studies.models import check_inputs, loader
    from selfspec.tools.studies.report import write_report
    from selfspec.tools.studies.report.panels import panels
    from selfspec.tools.studies.run import work_on
    from selfspec.tools.studies.study import REPORT, WORK, Study, read_study, require_packages

    prepare_quietly(machine.threads)
    require_packages((*WORK, *REPORT))
    found = Study.of(declared, "the command line") if study is None else read_study(study, declared)
    folder = to or Path(found.name)
    check_output_folder(folder)
    check_inputs(found)
    with counting_bar("studying") as count:
        finding = work_on(found, loader(found, machine.device), storage or folder, count)
    files = write_report(finding, folder)
    if output == "json":
        print_json(
            {
                "study": asdict(finding.study),
                "points": len(finding.results),
                "failed": [{"place": dict(each.point.place), "error": each.error} for each in finding.failed],
                "best": [panel.best[0] for panel in panels(finding) if panel.best],
                "files": [str(file) for file in files],
                "versions": versions(),
            }
        )
        return
    for panel in panels(finding):
        _print_panel(panel)
    for result in finding.failed:
        print(f"failed: {dict(result.point.place)}: {result.error}")
    print(f"{len(finding.results)} points, {len(finding.failed)} failed; the report is in {folder}")


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given: a study has its own defaults."""
    return {name: value for name, value in options.items() if value not in (None, [])}


def prepare_quietly(threads: int | None) -> None:
    """Set the number of threads, and let no bar of `transformers` cross the one of the command."""
    from transformers.utils import logging

    prepare_process(threads)
    logging.disable_progress_bar()


def _compare(first: Path, second: Path, as_json: bool) -> None:
    from selfspec.environment import versions
    from selfspec.tools.studies.report.compare import compare
    from selfspec.tools.studies.study import REPORT, require_packages

    require_packages(REPORT)
    found = compare(first, second)
    if as_json:
        print_json({**asdict(found), "versions": versions()})
    else:
        _print_comparison(found)


def _print_panel(panel: Panel) -> None:
    from rich.table import Column

    draft = Column("draft", overflow="fold", min_width=16)
    table = figures_table(panel.title, [draft], _COLUMNS.values())
    for row in panel.best[:_SHOWN]:
        table.add_row(row["draft"], *(_cell(row.get(name)) for name in _COLUMNS))
    console().print(table)


def _print_comparison(found: SideBySide) -> None:
    names = ("draft", "workload", "temperature")
    figures = ("alpha", "c", "predicted_speedup", "measured_speedup_median")
    sides = [f"{figure}_{side}" for figure in figures for side in "ab"]
    title = f"a: {found.studies[0]}, b: {found.studies[1]}"
    table = figures_table(title, names, (side.replace("_", " ") for side in sides))
    for row in found.rows:
        table.add_row(row["draft"], row["workload"], f"{row['temperature']:g}", *(_cell(row[side]) for side in sides))
    console().print(table)
    if any(found.alone):
        print(f"only in a: {found.alone[0]} drafts; only in b: {found.alone[1]}")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else f"{value:.2f}"
