"""Arms in turns for as long as there is time: a small benchmark that ends when it is to end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.measure.estimate import Estimate
from selfspec.measure.timing import Call
from selfspec.tools.bench.agreement import Pair, TextAgreement, compare
from selfspec.tools.bench.cell import Cell


class Runner(Protocol):
    """Whatever decodes a prompt: an arm."""

    def decode(self, prompts: Tensor, cell: Cell, seed: int) -> Call:
        """Decode prompts, `[1, tokens]`, under the conditions of a cell."""


@dataclass(frozen=True)
class Turn:
    """One prompt, decoded by every arm in every cell.

    Attributes:
        prompt: its number.
        calls: of each cell, one for each arm.
    """

    prompt: int
    calls: Mapping[Cell, Sequence[Call]]


@dataclass(frozen=True)
class Score:
    """An arm in a cell, whole calls.

    Attributes:
        speedup: how many times as fast as the first arm on the same prompt in the same turn: the median over turns.
        tokens_per_second: median over turns.
        tokens_per_pass: new tokens for each target pass, over all turns.
    """

    speedup: Estimate
    tokens_per_second: float
    tokens_per_pass: float


def race(
    arms: Sequence[Runner],
    cells: Sequence[Cell],
    prompts: Sequence[Tensor],
    until: float,
    tick: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Turn]:
    """Let all arms decode one prompt after the other, in turns, until the next turn would end too late.

    Before that each arm decodes one prompt untimed, since passes are recorded when they first run. There is one turn at
    least; one that is not complete when time is up is not counted. Which arm begins changes from turn to turn.

    Args:
        arms: the first one is what the others are compared with.
        cells: what is decoded in each turn.
        prompts: `[1, tokens]` each.
        until: when to end, by the clock.
        tick: called before each call.
        clock: in seconds.
    """
    for arm in reversed(arms):
        tick()
        arm.decode(prompts[0], cells[0], seed=0)
    turns: list[Turn] = []
    longest = 0.0
    while not turns or clock() + longest < until:
        started, number = clock(), len(turns) % len(prompts)
        turn = _turn(arms, cells, prompts[number], len(turns), None if not turns else until, tick, clock)
        if turn is None:
            break
        turns.append(Turn(number, turn))
        longest = max(longest, clock() - started)
    return turns


def scores(turns: Sequence[Turn], cell: Cell) -> list[Score]:
    """The score of each arm in a cell."""
    found = []
    for arm in range(len(turns[0].calls[cell])):
        calls = [turn.calls[cell][arm] for turn in turns]
        firsts = [turn.calls[cell][0] for turn in turns]
        speeds = [call.tokens / call.seconds for call in calls]
        ratios = [speed / (first.tokens / first.seconds) for speed, first in zip(speeds, firsts, strict=True)]
        passes = sum(call.passes for call in calls)
        found.append(
            Score(Estimate.of_median(ratios), statistics.median(speeds), sum(call.tokens for call in calls) / passes)
        )
    return found


def agreements(
    model: PreTrainedModel, turns: Sequence[Turn], cell: Cell, prompts: Sequence[Tensor]
) -> list[TextAgreement]:
    """Whether the greedy texts of each arm are those of the first."""
    return [
        compare(
            model,
            [
                Pair(tuple(prompts[turn.prompt][0].tolist()), tuple(calls[0].rows[0]), tuple(calls[arm].rows[0]))
                for turn in turns
                for calls in [turn.calls[cell]]
            ],
        )
        for arm in range(len(turns[0].calls[cell]))
    ]


def _turn(
    arms: Sequence[Runner],
    cells: Sequence[Cell],
    prompt: Tensor,
    number: int,
    until: float | None,
    tick: Callable[[], None],
    clock: Callable[[], float],
) -> dict[Cell, list[Call]] | None:
    """Every arm in every cell; None if time was up on the way."""
    found: dict[Cell, list[Call]] = {}
    order = [(number + place) % len(arms) for place in range(len(arms))]
    for cell in cells:
        calls: dict[int, Call] = {}
        for arm in order:
            if until is not None and clock() > until:
                return None
            tick()
            calls[arm] = arms[arm].decode(prompt, cell, seed=number)
        found[cell] = [calls[arm] for arm in range(len(arms))]
    return found
