"""`cd tests && python -m mutations`: plant each bug in a copy of the project, run its tests, print the score."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from platformdirs import user_cache_path

from mutations.anchor import AnchorError
from mutations.catalogue import CATALOGUE, Mutation
from mutations.runner import try_all
from mutations.selection import SelectionError
from mutations.trial import ROOT, Outcome, import_libraries

_RESULTS = user_cache_path("selfspec") / "planted-bugs"


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="Plant only the bugs whose name holds this text; may be given again.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Bugs to try at once.")] = 2,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that a bug may take.")] = 900,
    results: Annotated[
        Path, typer.Option(help="Folder of what is found. What was caught there in the same tree is not tried again.")
    ] = _RESULTS,
    output: Annotated[Literal["text", "json"], typer.Option(help="What is written to stdout.")] = "text",
) -> None:
    """Plant every bug of the catalogue; exit with 1 if the tests let one pass."""
    # Children that share the cores; set before torch is imported. Nothing is downloaded.
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    chosen = [mutation for mutation in CATALOGUE if any(text in mutation.name for text in only or [""])]
    started = time.monotonic()
    count = 0

    def tell(mutation: Mutation, outcome: Outcome) -> None:
        nonlocal count
        count += 1
        line = f"{count}/{len(chosen)} {outcome.verdict}: {mutation.name} ({outcome.said}; {outcome.seconds:.0f} s)"
        typer.echo(line, err=output == "json")

    import_libraries()
    try:
        outcomes = asyncio.run(try_all(chosen, ROOT, results, jobs, limit, tell))
    except asyncio.CancelledError:
        typer.echo("Ended. The same command goes on from here.", err=True)
        raise typer.Exit(130) from None
    except (AnchorError, SelectionError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    verdicts = Counter(outcome.verdict for outcome in outcomes.values())
    if output == "json":
        bugs = [{"name": name, **asdict(outcome)} for name, outcome in outcomes.items()]
        typer.echo(json.dumps({"bugs": bugs, "count": len(bugs), "verdicts": verdicts}, indent=2))
    else:
        typer.echo(
            f"Mutation score: {verdicts['caught']} of {len(chosen)}, in {(time.monotonic() - started) / 60:.1f} minutes"
        )
    if verdicts["caught"] < len(chosen):
        typer.echo(f"Output of the tests that let bugs pass: {results}", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
