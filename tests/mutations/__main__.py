"""`cd tests && python -m mutations`: plant each bug in a copy of the project, run its tests, print the score."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import asdict
from typing import Annotated, Literal

import typer

from mutations.anchor import AnchorError
from mutations.catalogue import CATALOGUE, Mutation
from mutations.run import ROOT, Outcome, try_all
from mutations.selection import SelectionError


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="Plant only the bugs whose name holds this text; may be given again.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Bugs to try at once.")] = 2,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that the tests of a bug may take.")] = 900,
    output: Annotated[Literal["text", "json"], typer.Option(help="What is written to stdout.")] = "text",
) -> None:
    """Plant every bug of the catalogue; exit with 1 if the tests let one pass."""
    # Children that share the cores. Nothing is downloaded.
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    chosen = [mutation for mutation in CATALOGUE if any(text in mutation.name for text in only or [""])]
    started = time.monotonic()
    done: list[str] = []

    def tell(mutation: Mutation, outcome: Outcome) -> None:
        done.append(mutation.name)
        line = f"{len(done)}/{len(chosen)} {outcome.verdict}: {mutation.name} ({outcome.said}; {outcome.seconds:.0f} s)"
        typer.echo(line, err=output == "json")

    try:
        outcomes = try_all(chosen, ROOT, jobs, limit, tell)
    except (AnchorError, SelectionError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    verdicts = Counter(outcome.verdict for outcome in outcomes.values())
    if output == "json":
        bugs = [{"name": name, **asdict(outcome)} for name, outcome in outcomes.items()]
        typer.echo(json.dumps({"bugs": bugs, "count": len(bugs), "verdicts": verdicts}, indent=2))
    else:
        minutes = (time.monotonic() - started) / 60
        typer.echo(f"Mutation score: {verdicts['caught']} of {len(chosen)}, in {minutes:.1f} minutes")
    raise typer.Exit(int(verdicts["caught"] < len(chosen)))


if __name__ == "__main__":
    typer.run(main)
