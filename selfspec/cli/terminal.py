"""Tables, progress bars and numbers on the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from threading import Event, Thread
from typing import TYPE_CHECKING

from rich.console import Console

from selfspec.measure.watch import Watch

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.progress import Progress
    from rich.table import Column, Table


# Seconds between lines that say how far work has come.
_EVERY = 10.0


def console(stderr: bool = False) -> Console:
    """Standard output or standard error, written to as given: no markup, no highlighting."""
    return Console(stderr=stderr, highlight=False, markup=False)


def figures_table(
    title: str | None, names: Iterable[str | Column], figures: Iterable[str], rows: Iterable[Sequence[str]] = ()
) -> Table:
    """Make a table with columns of names, to the left, and of figures, to the right; an empty row ends a section."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    right = (Column(figure, justify="right", overflow="fold") for figure in figures)
    # Lines between columns would take the room of figures.
    table = Table(*names, *right, title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    return table


def print_tables(table: DataFrame, columns: Sequence[str], most: int = 40) -> None:
    """Print the first lines of a table of the lab, one for each set of conditions, with the columns that it has."""
    from rich.table import Column

    from selfspec.tools.lab.report import best_first
    from selfspec.tools.lab.table import by_conditions, shown

    for title, lines in by_conditions(table):
        rows = best_first(lines)[:most]
        named = [name for name in columns if any(row.get(name) is not None for row in rows)]
        printed = [[row["arm"], *(shown(row, name) for name in named)] for row in rows]
        heads = [name.replace("_", " ") for name in named]
        console().print(figures_table(title, [Column("", no_wrap=True)], heads, printed))


def facts_table(facts: Mapping[str, str]) -> Table:
    """Make a table of what is called so and what it is, without a frame."""
    from rich.table import Column, Table

    table = Table("fact", Column("value", overflow="fold"), box=None, show_header=False, pad_edge=False)
    for fact in facts.items():
        table.add_row(*fact)
    return table


class ProgressBar(Watch):
    """Shows the steps of work in stages; a stage begins the bar anew."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._begun = 0

    def begin(self, steps: int) -> None:
        """Begin a stage of `steps` steps."""
        self._begun = 0
        self._progress.reset(self._task, total=steps)

    def step(self, what: str, steps: int = 1) -> None:
        """End the steps before, if any, and begin `what`."""
        self._progress.update(self._task, description=what, completed=self._begun)
        self._begun += steps

    def reach(self, done: float, steps: float, what: str = "") -> None:
        """Show how many of the steps are done."""
        self._progress.update(self._task, description=what, completed=done, total=steps)


@contextmanager
def progress_bar(verb: str) -> Iterator[ProgressBar]:
    """Show a bar on standard error for work of more than a few seconds, gone when done.

    Where that is no terminal it is a line every ten seconds.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    stderr = Console(stderr=True)
    progress = Progress(
        TextColumn(verb),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    )
    with progress, nullcontext() if stderr.is_terminal else _lines(verb, progress):
        yield ProgressBar(progress)


@contextmanager
def _lines(verb: str, progress: Progress) -> Iterator[None]:
    """Print how far the tasks have come every now and then, also while a step takes long."""
    done, began = Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(_EVERY):
            for task in progress.tasks:
                counted = f"{task.completed:.0f} of {task.total:.0f}" if (task.total or 0) > 1 else ""
                what = ", ".join(dict.fromkeys(each for each in (counted, task.description) if each))
                said = f"{verb}: {what or 'getting ready'}; {time.monotonic() - began:.0f} s"
                if task.total and 0 < task.completed < task.total and task.elapsed:
                    left = task.elapsed / task.completed * (task.total - task.completed)
                    said += f", about {left:.0f} s left"
                print(said, file=sys.stderr, flush=True)

    thread = Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
