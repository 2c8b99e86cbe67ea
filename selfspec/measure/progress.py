"""Telling a caller how far long work has come."""

from __future__ import annotations

from typing import Protocol


class Watch(Protocol):
    """Shows each step."""

    def begin(self, steps: int) -> None:
        """Begin work of `steps` steps."""

    def step(self, what: str) -> None:
        """A step begins."""


class Unwatched:
    """Tells nobody."""

    def begin(self, steps: int) -> None:
        """Nothing."""

    def step(self, what: str) -> None:
        """Nothing."""
