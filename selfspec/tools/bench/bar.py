"""How far a session of the benchmark is, as a progress bar."""

from __future__ import annotations

from rich.progress import Progress

from selfspec.tools.bench.cell import Cell


class Bar:
    """Shows the steps of a session, one cell after the other.

    Args:
        progress: where it is shown.
        cells: how many there will be.
    """

    def __init__(self, progress: Progress, cells: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._cells, self._begun = cells, 0

    def begin(self, cell: Cell, steps: int) -> None:
        """Show which cell is measured now."""
        self._begun += 1
        what = f"cell {self._begun} of {self._cells}: {cell.title}"
        self._progress.reset(self._task, total=max(steps, 1), description=what)

    def step(self) -> None:
        """Show how far it is."""
        self._progress.advance(self._task)
