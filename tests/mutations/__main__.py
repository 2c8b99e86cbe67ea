"""`cd tests && python -m mutations`: plant each bug in a copy of the project, run its tests, print the score."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from mutations.catalogue import CATALOGUE
from mutations.trial import Outcome, require_sound, try_mutation


def main(
    only: Annotated[str, typer.Option(help="Plant only the bugs whose name holds this text.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Bugs to try at once, each in a process and a copy of its own.")] = 1,
) -> None:
    """Plant every bug of the catalogue in turn; exit with 1 if the tests let one pass."""
    console = Console(highlight=False)
    chosen = [mutation for mutation in CATALOGUE if only in mutation.name]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("tests that must pass without a bug", total=len(chosen) + 1)
        require_sound(Path(folder), chosen)
        progress.update(bar, advance=1, description="planting bugs")
        with ThreadPoolExecutor(jobs) as pool:
            tried = [pool.submit(try_mutation, Path(folder), mutation) for mutation in chosen]
            for done in as_completed(tried):
                outcome = done.result()
                outcomes.append(outcome)
                progress.advance(bar)
                verdict = "[green]caught[/]  " if outcome.caught else "[red]SURVIVED[/]"
                console.print(f"{verdict} {outcome.mutation.name} [dim]({outcome.said}, {outcome.seconds:.0f} s)[/]")
    caught = sum(outcome.caught for outcome in outcomes)
    console.print(f"Mutation score: {caught} of {len(outcomes)} ({100 * caught / max(len(outcomes), 1):.0f} %)")
    if caught < len(outcomes):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
