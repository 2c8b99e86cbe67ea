"""Settings of a calibration. Each field is also an option of `selfspec calibrate`, and its help describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from typer import Option

from selfspec.errors import DraftConfigError
from selfspec.measure.settings import check_numbers

# Larger trees than pay on any machine that was looked at.
_MOST_NODES = 256


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What is measured.

    Raises:
        DraftConfigError: a value is out of range.
    """

    max_new_tokens: Annotated[int, Option(min=8, help="Generate N tokens a text.")] = 48
    temperature: Annotated[float, Option(help="Temperature of sampling, above 0.")] = 0.8
    longest_draft: Annotated[int, Option(min=1, help="Draft at most N tokens a round.")] = 7
    nodes: Annotated[
        int, Option(min=0, help="Try trees of at most N tokens, siblings included, and of half as many; 0: none.")
    ] = 16
    batch: Annotated[int, Option(min=1, help="Generate N rows at once.")] = 1
    repeats: Annotated[int, Option(min=1, help="Time each draft N times; slow ones drop out before.")] = 3
    seed: Annotated[int, Option(help="Seed of all random draws.")] = 0

    def __post_init__(self) -> None:
        check_numbers(self, DraftConfigError)
        if self.nodes > _MOST_NODES:
            raise DraftConfigError(f"nodes of trees to try are 0 to {_MOST_NODES}, got {self.nodes}")
        if not 0 < self.temperature < math.inf:
            raise DraftConfigError(f"a temperature to sample at is above 0, got {self.temperature}")
