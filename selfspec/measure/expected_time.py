"""Expected time of work, from its number of tokens, of which a few are timed before; and progress.

A tool counts the tokens as a function of its sizes. Sizes that nobody asked for shrink until the time is enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from selfspec.device import Timer

# Tokens of a timed pass over several, and times that passes are timed while they take less than some seconds.
_READ, _TIMES, _ENOUGH = 32, 3, 0.5
# What a token that is read among many takes of one that is passed by itself, where it was not timed.
_READ_SHARE = 0.15
# Steps in which sizes shrink, from what is usual to the fewest.
_STEPS = 32


@dataclass(frozen=True)
class Work:
    """Work of a model, in tokens: `steps` take a pass each, those `read` share passes with many others."""

    steps: float = 0.0
    read: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.steps + other.steps, self.read + other.read)

    @property
    def share(self) -> float:
        """Weight of the work beside other work, in tokens that take a pass each."""
        return self.steps + _READ_SHARE * self.read

    def times(self, count: float) -> Work:
        """Return so many times the work."""
        return Work(self.steps * count, self.read * count)


@dataclass(frozen=True)
class TokenTimes:
    """Seconds of a token on this machine: passed by itself, and read among many."""

    step: float
    read: float

    @classmethod
    @torch.no_grad()
    def measured(cls, model: PreTrainedModel, clock: Callable[[], float] = time.perf_counter) -> TokenTimes:
        """Time passes of the stock model over one and over 32 tokens: the fastest of up to three, after a first one."""
        timer = Timer(clock, model.device)

        def fastest(tokens: int) -> float:
            ids = torch.ones(1, tokens, dtype=torch.long, device=model.device)
            taken: list[float] = []
            while len(taken) < 1 + _TIMES and sum(taken) <= _ENOUGH:
                taken.append(timer.of(lambda: model(input_ids=ids, use_cache=False)))
            return min(taken)

        return cls(fastest(1), fastest(_READ) / _READ)

    def seconds(self, work: Work) -> float:
        """Return the seconds that some work takes."""
        return work.steps * self.step + work.read * self.read


@dataclass(frozen=True)
class Size:
    """A size of some work: the usual one, and the fewest that are of use."""

    usual: int
    fewest: int

    def shrunk(self, share: float) -> int:
        """Return the size at a share of the way from the fewest, 0, to the usual, 1."""
        return self.fewest + int((self.usual - self.fewest) * share)


@dataclass(frozen=True)
class FittedWork:
    """Sizes of some work that fit the time, by name; `seconds` may exceed it where even the fewest take longer."""

    sizes: Mapping[str, int]
    shrunk: Mapping[str, int]
    seconds: float
    times: TokenTimes

    def sentence(self, minutes: float) -> str:
        """Say how long it will take, and what was left out for that."""
        said = f"{_duration(self.seconds)} expected; a token takes {self.times.step * 1000:.3g} ms here"
        if self.shrunk:
            fewer = ", ".join(f"--{name.replace('_', '-')} {size}" for name, size in self.shrunk.items())
            said += f". To stay within {minutes:g} minutes: {fewer}; --minutes N allows more"
        return said


def fit(
    sizes: Mapping[str, Size], work: Callable[[Mapping[str, int]], Work], times: TokenTimes, minutes: float
) -> FittedWork:
    """Shrink sizes, all by the same share, until the work takes no more than some minutes, or they are the fewest."""
    for step in range(_STEPS, -1, -1):
        chosen = {name: size.shrunk(step / _STEPS) for name, size in sizes.items()}
        seconds = times.seconds(work(chosen))
        if seconds <= 60 * minutes:
            break
    shrunk = {name: size for name, size in chosen.items() if size < sizes[name].usual}
    return FittedWork(chosen, shrunk, seconds, times)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"about {max(1, round(seconds))} s"
    return f"about {round(seconds / 60)} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


class Watch(Protocol):
    """Shows each step."""

    def begin(self, steps: int) -> None:
        """Begin work of `steps` steps."""

    def step(self, what: str) -> None:
        """Begin a step."""


class Unwatched:
    """Shows nothing."""

    def begin(self, steps: int) -> None:
        """Do nothing."""

    def step(self, what: str) -> None:
        """Do nothing."""
