"""`selfspec search`: the skip set that promises the highest speed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec.cli.options import Output, Threads
from selfspec.cli.study_options import (
    DraftLengths,
    NewTokens,
    Pricing,
    PromptTokens,
    Storage,
    StudyDevice,
    StudyDtype,
    Texts,
)
from selfspec.errors import DraftConfigError

_SIZES = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


def search(
    model: Annotated[str, typer.Argument(help="A folder, a hub name, or demo.")],
    to: Annotated[
        Path, typer.Option("--to", metavar="FILE", help="The JSON file to write, for --draft skip-file:FILE.")
    ],
    evaluations: Annotated[int, typer.Option("--evaluations", min=1, help="Skip sets to evaluate.")] = 100,
    sublayers: Annotated[
        str | None,
        typer.Option("--sublayers", metavar="N|MIN-MAX", help="Sublayers to leave out; default: up to half of them."),
    ] = None,
    workload: Annotated[
        str, typer.Option("--workload", metavar="WORKLOAD", help="demo, or NAME=FILE of prompts.")
    ] = "demo",
    temperature: Annotated[float, typer.Option("--temperature", help="Of the texts; 0: greedily.")] = 1.0,
    draft_length: DraftLengths = None,
    texts: Texts = None,
    prompt_tokens: PromptTokens = None,
    new_tokens: NewTokens = None,
    reach: Annotated[int, typer.Option("--reach", min=1, help="Positions of a draft that are told apart.")] = 1,
    pricing: Pricing = None,
    seed: Annotated[int, typer.Option("--seed", help="Of all that is drawn.")] = 0,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="FOLDER", help="Keep the search there, to go on with it or to share it."),
    ] = None,
    storage: Storage = None,
    dtype: StudyDtype = None,
    device: StudyDevice = "auto",
    threads: Threads = None,
    output: Output = "text",
) -> None:
    """Search for the skip set that promises the highest speed, by measured costs and the model's own text.

    By dynamic programming on hidden states (CLaSp, KnapSpec) and by importance first, then by small changes of the
    best sets known.
    """
    fewest, most = _sizes(sublayers)
    declared: dict[str, Any] = {
        "models": model,
        "workloads": workload,
        "temperatures": temperature,
        "seeds": seed,
        "texts": texts,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "pricing": pricing,
        "dtype": dtype,
    }
    given = {name: value for name, value in declared.items() if value is not None}

    from selfspec.cli.search_run import Job, run
    from selfspec.tools.studies.search import SearchPlan

    lengths = {"draft_lengths": tuple(draft_length)} if draft_length else {}
    plan = SearchPlan(evaluations, fewest, most, reach=reach, seed=seed, **lengths)
    run(Job(given, plan, to, storage or (None if keep is None else str(keep)), device, threads, output))


def _sizes(text: str | None) -> tuple[int, int | None]:
    if text is None:
        return 1, None
    found = _SIZES.fullmatch(text.strip())
    if found is None:
        raise DraftConfigError(f"--sublayers {text!r} is not understood; write a number, or a range such as 2-6")
    return int(found[1]), int(found[2] or found[1])
