"""Time of one call of an arm, prefill apart from decoding, by the same clock for every arm."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import torch

from selfspec.decode.output import Stats
from selfspec.device import Timer


@dataclass(frozen=True, order=True)
class DraftShape:
    """Counts the tokens drafted for each row, 0 in a plain round, and the draft steps, 0 in a look-up, of a round."""

    drafted: int
    steps: int


@dataclass(frozen=True)
class Call:
    """One call and its times, in seconds; `rows` are the new tokens of each row.

    Attributes:
        seconds: of the whole call, prefill included.
        first_seconds: until the first tokens were there: prefill, and the step or round after it.
        first_tokens: new tokens of all rows by then.
        passes: target passes, prefill not counted; of speculative arms that is rounds.
        rounds: of selfspec's arms, the number of rounds of each shape.
        seed: of its draws.
    """

    rows: list[list[int]]
    seconds: float
    first_seconds: float
    first_tokens: int
    passes: int
    stats: Stats | None = None
    rounds: Counter[DraftShape] = field(default_factory=Counter)
    seed: int = 0

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.rows))

    @property
    def seconds_a_token(self) -> float:
        """Seconds of a token behind the first ones; of a call that has no others, of all."""
        further = self.tokens - self.first_tokens
        return (self.seconds - self.first_seconds) / further if further > 0 else self.seconds / self.tokens


class Stopwatch(Timer):
    """Runs from when it is made."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(time.perf_counter, device)
        self._started = self.now()

    def read(self) -> float:
        return self.now() - self._started
