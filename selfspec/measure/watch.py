"""Progress of work, step by step, as whoever waits for it sees it."""

from __future__ import annotations


class Watch:
    """Is told of the steps of work in stages, and shows nothing; subclasses show them."""

    def begin(self, steps: int) -> None:
        """Begin a stage of `steps` steps."""

    def step(self, what: str, steps: int = 1) -> None:
        """Begin `what`, which counts as so many steps."""
