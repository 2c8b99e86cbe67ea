"""Progress of work, step by step, as whoever waits for it sees it."""

from __future__ import annotations

from typing import Protocol


class Watch(Protocol):
    """Shows the steps of work in stages."""

    def begin(self, steps: int) -> None:
        """Begin a stage of `steps` steps."""

    def step(self, what: str, steps: int = 1) -> None:
        """Begin `what`, which counts as so many steps."""


class Unwatched:
    """Shows nothing."""

    def begin(self, steps: int) -> None:
        """Do nothing."""

    def step(self, what: str, steps: int = 1) -> None:
        """Do nothing."""
