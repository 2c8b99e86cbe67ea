"""Progress of work, step by step, as whoever waits for it sees it."""

from __future__ import annotations


class Watch:
    """Receives the steps of work, stage by stage, and shows nothing; subclasses show progress."""

    def begin(self, steps: int) -> None:
        """Begin a stage of `steps` steps."""

    def step(self, what: str, steps: int = 1) -> None:
        """Begin `what`, which counts as so many steps."""
