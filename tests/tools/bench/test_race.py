"""Arms in turns until time is up: what counts, what is compared, and which arm begins."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from helpers import tiny
from selfspec.measure.timing import Call
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.race import Turn, agreements, race, scores

GREEDY, SAMPLED = Cell("demo", 0.0, 1, 3, 4), Cell("demo", 0.8, 1, 3, 4)
PROMPTS = [torch.tensor([[1, 2, number]]) for number in range(3)]


@dataclass
class Clock:
    """Time that passes only when something is decoded."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeArm:
    """Takes some seconds for four tokens in some passes."""

    clock: Clock
    seconds: float
    passes: int = 4
    tokens: tuple[int, ...] = (5, 6, 7, 8)
    seen: list[tuple[int, Cell, int]] = field(default_factory=list)

    def decode(self, prompts: Tensor, cell: Cell, seed: int) -> Call:
        self.clock.now += self.seconds
        self.seen.append((int(prompts[0, -1]), cell, seed))
        return Call([list(self.tokens)], self.seconds, self.seconds / 4, 1, self.passes)


def raced(arms: list[FakeArm], until: float) -> list[Turn]:
    return race(arms, (GREEDY, SAMPLED), PROMPTS, until, lambda: None, arms[0].clock)


def test_turns_go_on_while_the_next_one_ends_in_time() -> None:
    clock = Clock()
    arms = [FakeArm(clock, 2.0), FakeArm(clock, 1.0, 2)]
    turns = raced(arms, until=22.0)
    # Three seconds to warm up, and six a turn.
    assert (len(turns), clock.now) == (3, 21.0)
    assert [turn.prompt for turn in turns] == [0, 1, 2]
    # Untimed first; then each prompt in both cells, with the seed of its turn.
    assert arms[0].seen[1:5] == [(0, GREEDY, 0), (0, SAMPLED, 0), (1, GREEDY, 1), (1, SAMPLED, 1)]


@pytest.mark.parametrize("until", [0.0, 8.0])
def test_there_is_one_turn_at_least(until: float) -> None:
    clock = Clock()
    assert len(raced([FakeArm(clock, 2.0), FakeArm(clock, 1.0)], until)) == 1


def test_a_turn_that_time_cuts_short_does_not_count() -> None:
    clock = Clock()
    slow = FakeArm(clock, 1.0)

    class Slowing(FakeArm):
        def decode(self, prompts: Tensor, cell: Cell, seed: int) -> Call:
            # The second turn takes far longer than the first.
            self.seconds = 50.0 if seed else 1.0
            return super().decode(prompts, cell, seed)

    assert len(raced([Slowing(clock, 1.0), slow], until=11.0)) == 1
    assert clock.now < 60


def test_which_arm_begins_changes() -> None:
    clock, order = Clock(), []

    class Noted(FakeArm):
        def decode(self, prompts: Tensor, cell: Cell, seed: int) -> Call:
            order.append((seed, self.seconds))
            return super().decode(prompts, cell, seed)

    raced([Noted(clock, 2.0), Noted(clock, 1.0)], until=16.0)
    assert [order[2], order[6]] == [(0, 2.0), (1, 1.0)]


def test_scores_are_ratios_of_the_same_turn() -> None:
    clock = Clock()
    turns = raced([FakeArm(clock, 2.0), FakeArm(clock, 0.5, 2)], until=30.0)
    first, other = scores(turns, SAMPLED)
    assert (first.speedup.value, first.tokens_per_second, first.tokens_per_pass) == (1.0, 2.0, 1.0)
    assert (other.speedup.value, other.tokens_per_second, other.tokens_per_pass) == (4.0, 8.0, 2.0)
    assert other.speedup.low == other.speedup.high == 4.0


def test_greedy_texts_are_compared_with_the_first_arms() -> None:
    clock = Clock()
    arms = [FakeArm(clock, 1.0), FakeArm(clock, 1.0), FakeArm(clock, 1.0, tokens=(5, 6, 7, 9))]
    turns = raced(arms, until=100.0)
    found = agreements(tiny.llama(), turns, GREEDY, PROMPTS)
    assert [(each.texts, each.equal) for each in found] == [(3, 3), (3, 3), (3, 0)]
