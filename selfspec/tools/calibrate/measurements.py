"""How much a calibration measures. Each field is also an option of `selfspec calibrate`, and its help describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import typer

from selfspec.errors import DraftConfigError


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What is measured.

    Raises:
        DraftConfigError: a value is out of range.
    """

    max_new_tokens: Annotated[int, typer.Option(min=8, help="Generate N tokens a text.")] = 48
    temperature: Annotated[float, typer.Option(help="Temperature of sampling, above 0.")] = 0.8
    longest_draft: Annotated[int, typer.Option(min=1, help="Draft at most N tokens a round.")] = 7
    batch: Annotated[int, typer.Option(min=1, help="Generate N rows at once.")] = 1
    repeats: Annotated[int, typer.Option(min=1, help="Time each draft N times; slow ones drop out before.")] = 3
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "repeats", "batch", "longest_draft"):
            if getattr(self, name) < 1:
                raise DraftConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.temperature < math.inf:
            raise DraftConfigError(f"a temperature to sample at is above 0, got {self.temperature}")
