"""`selfspec ablate`: which layers can a model do without, and what is it worth?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from selfspec.cli.options import MINUTES, DtypeOption, MachineOptions, Minutes, Output, prepare_process
from selfspec.cli.terminal import announce, share_bar
from selfspec.errors import StudyError
from selfspec.measure.embedded import DEMO

_SHOWN = 8
_DRAFTS = "`exits`, `layers`, `sublayers`, `random:4x20` (20 sets of 4 sublayers), `heads:FOLDER`, or any draft."
_WORKLOADS = "Prompts, as of `selfspec bench`; or `demo`."
_FIGURES = ("alpha", "c", "predicted_speedup", "measured_speedup_median")

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
    reach: Annotated[_Count, typer.Option(help="Positions of a draft to tell apart; each costs a pass.")] = None
    confirm: Annotated[_Count, typer.Option(help="Drafts of each text and temperature confirmed by generation.")] = None


@dataclass(frozen=True, kw_only=True)
class Ablated:
    """`selfspec ablate`. A row of `best` is one of `points.parquet`.

    Attributes:
        best: the most promising draft of each model, text and temperature.
        doubts: which figures cannot be, or say less than they seem to.
    """

    study: dict[str, Any]
    points: int
    failed: list[dict[str, Any]]
    best: list[dict[str, Any]]
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
    minutes: Minutes = MINUTES,
    output: Output = "text",
) -> Ablated:
    """Study drafts of all kinds on models and texts, and write tables and pictures.

    Acceptance of exits and skip sets is estimated by teacher forcing, many at once, and a sample confirmed by real
    generation; that of other drafts is counted in generations. Repeat an interrupted command to resume it.
    """
    declared = given({**asdict(lists), **asdict(estimates)})
    if study is None and not declared:
        raise StudyError(f"there is nothing to study; give a study file, or --model {DEMO} and --draft")

    from selfspec.tools.lab.ablation import fit_study, resize, sizes_of, work_on
    from selfspec.tools.lab.drafts import Given, is_judged_by_teacher_forcing, named_drafts
    from selfspec.tools.lab.report import require_packages
    from selfspec.tools.lab.runs import Runs
    from selfspec.tools.lab.study import Study, check_inputs, declared_in, load, read_study
    from selfspec.tools.lab.study_report import described, findings, timing_doubts, write_report

    prepare_quietly(machine.threads)
    require_packages()
    said = set(declared) if study is None else declared.keys() | declared_in(study)
    found = Study.of(declared, "the command line") if study is None else read_study(study, declared)
    folder = to or Path(found.name)
    runs = Runs(folder)
    check_inputs(found)
    first, *_ = found.models
    loaded = {first: load(first, found, machine.device)}
    adapter, depth = loaded[first].adapter, loaded[first].depth
    drafts = named_drafts(found.drafts, loaded[first].model, adapter, found.seed)
    free = {name: size for name, size in sizes_of(found).items() if name not in said}
    counted = sum(not is_judged_by_teacher_forcing(each, adapter, depth) for each in map(Given().drafter, drafts))
    fitted = fit_study(found, free, len(drafts), loaded[first], minutes, runs, counted)
    announce("studying", fitted, minutes)
    found = resize(found, fitted.sizes)
    with share_bar("studying") as count:
        # One model is in memory at a time.
        finding = work_on(found, lambda name: loaded.pop(name, None) or load(name, found, machine.device), runs, count)
    files = write_report(finding, folder)
    shown = findings(finding)
    about = described(finding)
    doubts = [*timing_doubts(finding), *(f"{each.title}: {said}" for each in shown for said in each.doubts)]
    if output == "text":
        for each in shown:
            print_rows(each.title, each.best[:_SHOWN], ("draft_length", *_FIGURES, "exact"))
            print(f"{each.sentence()}\n" if each.best else f"{each.title}: there is no draft to judge.\n")
        for doubt in doubts:
            print(doubt)
        for run in finding.failed:
            print(f"failed: {dict(run.asked.place)}: {run.error}")
        print(f"{len(finding.runs)} points, {len(finding.failed)} failed; the report is in {folder}")
    return Ablated(
        study=asdict(finding.study),
        points=about["points"],
        failed=about["failed"],
        best=[dict(each.best[0]) for each in shown if each.best],
        doubts=doubts,
        files=[str(file) for file in files],
    )


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given: a study has its own defaults."""
    return {name: value for name, value in options.items() if value not in (None, [])}


def prepare_quietly(threads: int | None) -> None:
    """Set the number of threads, and let no bar of `transformers` cross the one of the command."""
    from transformers.utils import logging

    prepare_process(threads)
    logging.disable_progress_bar()


def print_rows(title: str, rows: Sequence[Mapping[str, Any]], figures: Sequence[str]) -> None:
    """Print drafts with some of their figures; what is not known is left blank."""
    import pandas

    table = pandas.DataFrame(list(rows)).reindex(columns=["draft", *figures]).astype(object)
    shown = table.where(table.notna(), "").rename(columns=lambda name: name.replace("_", " "))
    print(f"{title}\n{shown.to_string(index=False, float_format='{:.2f}'.format)}\n")
