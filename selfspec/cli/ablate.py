"""`selfspec ablate`: which layers can a model do without, and what is it worth?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec.cli.options import Output, Threads
from selfspec.cli.study_options import (
    Confirm,
    DraftLengths,
    Drafts,
    Models,
    NewTokens,
    Pricing,
    PromptTokens,
    Reach,
    Rules,
    Seeds,
    Storage,
    StudyDevice,
    StudyDtype,
    Temperatures,
    Texts,
    Workloads,
)
from selfspec.errors import StudyError


def ablate(
    study: Annotated[
        Path | None, typer.Argument(help="A study as TOML or YAML; options override it, or declare one without it.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FOLDER", help="Where the study and its report are kept; default: its name."),
    ] = None,
    model: Models = None,
    draft: Drafts = None,
    workload: Workloads = None,
    temperature: Temperatures = None,
    rule: Rules = None,
    draft_length: DraftLengths = None,
    seed: Seeds = None,
    texts: Texts = None,
    prompt_tokens: PromptTokens = None,
    new_tokens: NewTokens = None,
    reach: Reach = None,
    confirm: Confirm = None,
    pricing: Pricing = None,
    storage: Storage = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="Show two finished studies side by side, and do nothing else."),
    ] = None,
    dtype: StudyDtype = None,
    device: StudyDevice = "auto",
    threads: Threads = None,
    output: Output = "text",
) -> None:
    """Study drafts of all kinds on models and texts, and write tables and pictures of it.

    Acceptance is estimated for every draft by teacher forcing, many drafts at once; a sample is confirmed by real
    generation. Repeating a command goes on where it was interrupted; several at once share the work.
    """
    declared: dict[str, Any] = {
        "models": model,
        "drafts": draft,
        "workloads": workload,
        "temperatures": temperature,
        "rules": rule,
        "draft_lengths": draft_length,
        "seeds": seed,
        "texts": texts,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "reach": reach,
        "confirm": confirm,
        "pricing": pricing,
        "dtype": dtype,
    }
    given = {name: value for name, value in declared.items() if value not in (None, [])}
    if compare is not None:
        from selfspec.cli.ablate_run import run_compare

        run_compare(*compare, output)
        return
    if study is None and not given:
        raise StudyError("there is nothing to study; give a study file, or --model demo and what to draft with")

    from selfspec.cli.ablate_run import Job, run

    run(Job(study, given, to, storage, device, threads, output))
