"""`cd tests && python -m mutations`: plant each bug in a copy of the project, run its tests, print the score."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer

from mutations.anchor import EntryError
from mutations.catalogue import CATALOGUE, Mutation
from mutations.run import ROOT, Outcome, try_all


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="Plant only the bugs whose name holds this text; may be given again.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Bugs to try at once.")] = 2,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that the tests of a bug may take.")] = 900,
) -> None:
    """Plant every bug of the catalogue; exit with 1 if the tests let one pass."""
    # Children that share the cores. Nothing is downloaded.
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    chosen = [mutation for mutation in CATALOGUE if any(text in mutation.name for text in only or [""])]
    started = time.monotonic()
    done: list[str] = []

    def tell(mutation: Mutation, outcome: Outcome) -> None:
        done.append(mutation.name)
        typer.echo(f"{len(done)}/{len(chosen)} {outcome.verdict}: {mutation.name} ({outcome.said})")

    try:
        outcomes = try_all(chosen, ROOT, jobs, limit, tell)
    except EntryError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    caught = sum(outcome.verdict == "caught" for outcome in outcomes.values())
    minutes = (time.monotonic() - started) / 60
    typer.echo(f"Mutation score: {caught} of {len(chosen)}, in {minutes:.1f} minutes")
    raise typer.Exit(int(caught < len(chosen)))


if __name__ == "__main__":
    typer.run(main)
