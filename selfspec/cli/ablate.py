"""`selfspec ablate`: which layers can a model do without, and what is it worth?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from selfspec.cli.options import DtypeOption, MachineOptions, Output, Runtime, prepare_process
from selfspec.cli.terminal import print_tables, progress_bar
from selfspec.errors import StudyError
from selfspec.measure.embedded import DEMO

_DRAFTS = "`exits`, `layers`, `pairs`, `sublayers`, `random:4x20` (20 sets of 4), `heads:FOLDER`, or any draft."
_WORKLOADS = "Prompts, as of `selfspec bench`; or `demo`."
PRINTED = ("draft_length", "n", "alpha", "acceptance_rate", "c", "predicted_speedup", "speedup", "equal")
SHOWN = 8
"""Columns and lines of tables that commands print."""

_Texts = list[str] | None
_Numbers = list[int] | None
_Count = int | None
DraftLengths = Annotated[_Numbers, typer.Option("--draft-length", help="Draft length to choose from; may be repeated.")]
Pricing = Literal["measured", "weights"] | None


@dataclass(frozen=True, kw_only=True)
class TextsAndCosts:
    """Texts and costs."""

    texts: Annotated[_Count, typer.Option(help="Texts of each workload.")] = None
    prompt_tokens: Annotated[_Count, typer.Option(help="Cut or join prompts to N tokens. Default: whole prompts.")] = (
        None
    )
    chat: Annotated[bool | None, typer.Option("--chat", help="Write prompts by the checkpoint's chat template.")] = None
    max_new_tokens: Annotated[_Count, typer.Option(help="Most tokens that the model adds to each.")] = None
    pricing: Annotated[Pricing, typer.Option(help="Costs `measured` here, or by the `weights` a step reads.")] = None
    dtype: Annotated[DtypeOption | None, typer.Option(metavar="DTYPE", help="Compute in it; default: float32.")] = None


@dataclass(frozen=True, kw_only=True)
class Lists:
    """Lists of the study: each may be repeated."""

    models: Annotated[_Texts, typer.Option("--model", metavar="MODEL", help=f"A folder, a hub name, or `{DEMO}`.")] = (
        None
    )
    drafts: Annotated[_Texts, typer.Option("--draft", metavar="DRAFT", help=_DRAFTS)] = None
    workloads: Annotated[_Texts, typer.Option("--workload", metavar="NAME=FILE", help=_WORKLOADS)] = None
    temperatures: Annotated[list[float] | None, typer.Option("--temperature", help="0: greedy decoding.")] = None
    draft_lengths: DraftLengths = None


@dataclass(frozen=True, kw_only=True)
class Estimates(TextsAndCosts):
    """Texts, estimates and costs."""

    seed: Annotated[_Count, typer.Option(help="Seed of sampled texts.")] = None
    reach: Annotated[_Count, typer.Option(help="Positions of a draft to tell apart, each a pass; default: all.")] = None
    runtime: Runtime = None
    confirm: Annotated[_Count, typer.Option(help="Drafts of each text and temperature confirmed by generation.")] = None


@dataclass(frozen=True, kw_only=True)
class Ablated:
    """`selfspec ablate`.

    Attributes:
        best: lines of the table (docs/columns.md): each draft at the length that promises most, and again where it was
            confirmed.
        lines: number of lines of the table.
        failed: what ended in an error, which is kept.
        provenance: what was measured, and with what.
        doubts: which figures cannot be, or say less than they seem to.
    """

    study: dict[str, Any]
    lines: int
    failed: list[dict[str, Any]]
    best: list[dict[str, Any]]
    provenance: list[dict[str, Any]]
    doubts: list[str]
    files: list[str]


def ablate(
    lists: Lists,
    estimates: Estimates,
    machine: MachineOptions,
    study: Annotated[Path | None, typer.Argument(metavar="STUDY", help="A study as TOML; options override it.")] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Study and report go there; default: the name of the study.")
    ] = None,
    output: Output = "text",
) -> Ablated:
    """Study drafts of all kinds on models and texts, and write tables and pictures.

    Acceptance of exits and skip sets is estimated by teacher forcing, many at once, and a sample confirmed by real
    generation; that of other drafts is counted in generations. Repeat an interrupted command to resume it.
    """
    declared = given({**asdict(lists), **asdict(estimates)})
    if study is None and not declared:
        raise StudyError(f"there is nothing to study; give a study file, or --model {DEMO} and --draft")

    from selfspec.tools.lab.ablation import work_on
    from selfspec.tools.lab.report import best_first, provenances, require_packages, write_report
    from selfspec.tools.lab.runs import Runs
    from selfspec.tools.lab.study import Study, check_inputs, load, read_study
    from selfspec.tools.lab.table import doubts

    prepare_quietly(machine.threads)
    require_packages()
    found = Study.of(declared, "the command line") if study is None else read_study(study, declared)
    folder = to or Path(found.name)
    runs = Runs(folder)
    check_inputs(found)
    first, *_ = found.models
    loaded = {first: load(first, found, machine.device)}
    # There may be fewer texts than were asked for.
    found = replace(found, texts=max(map(len, loaded[first].prompts.values())))
    with progress_bar("studying") as bar:
        # One model is in memory at a time.
        finding = work_on(found, lambda name: loaded.pop(name, None) or load(name, found, machine.device), runs, bar)
    declares = named_alone(asdict(finding.study))
    files = write_report(f"Study of drafts: {found.name}", finding.judged, declares, folder)
    result = Ablated(
        study=declares,
        lines=len(finding.table),
        failed=[{name: row.get(name) for name in ("model", "workload", "arm", "error")} for row in finding.failed],
        best=best_first(finding.table),
        provenance=provenances(finding.judged),
        doubts=doubts(finding.table),
        files=[*map(str, files)],
    )
    if output == "text":
        print_tables(finding.table, PRINTED, SHOWN)
        for doubt in result.doubts:
            print(doubt)
        for row in result.failed:
            print(f"failed: {', '.join(str(each) for each in row.values() if each)}")
        print(f"{result.lines} lines, {len(result.failed)} failed; the report is in {folder}")
    return result


def named_alone(study: dict[str, Any]) -> dict[str, Any]:
    """Return the declaration of a study without the folders in which its files lie, which are nobody's concern."""
    workloads = [each.partition("=") for each in study["workloads"]]
    return {
        **study,
        "models": [Path(model).name for model in study["models"]],
        "workloads": [name + named + place.rpartition("/")[2] for name, named, place in workloads],
    }


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given: a study has its own defaults."""
    return {name: value for name, value in options.items() if value not in (None, [])}


def prepare_quietly(threads: int | None) -> None:
    """Set the number of threads, and let no bar of `transformers` cross the one of the command."""
    from transformers.utils import logging

    prepare_process(threads)
    logging.disable_progress_bar()
