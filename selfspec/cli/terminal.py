"""What the terminal can show."""

from __future__ import annotations

from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from selfspec.errors import UnsupportedOptionError


def require_colours(stream: IO[str]) -> None:
    """Refuse a display that says nothing without colours and strokes.

    Raises:
        UnsupportedOptionError: `stream` is no terminal.
    """
    if not Console(file=stream).is_terminal:
        raise UnsupportedOptionError(
            "--show-drafts marks tokens by colour, and standard output is no terminal; set FORCE_COLOR=1 to colour it "
            "nevertheless, or use --output json, which then lists every round"
        )


class StepBar:
    """Shows the steps of work in stages; a stage begins the bar anew.

    Args:
        progress: where it is shown.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task("", total=None)
        self._begun = 0

    def begin(self, steps: int) -> None:
        """Show how far the stage is to go."""
        self._begun = 0
        self._progress.reset(self._task, total=steps)

    def step(self, what: str) -> None:
        """Show what is done now; what was done before is over."""
        self._progress.update(self._task, description=what, completed=self._begun)
        self._begun += 1


def progress_bar(verb: str) -> Progress:
    """A bar on standard error for work of more than a few seconds, gone when done; nothing where that is no terminal.

    Args:
        verb: what is being done. What a task's description says stands behind the bar.
    """
    console = Console(stderr=True)
    return Progress(
        TextColumn(verb),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
