"""Run arms in turns on the same prompts, so that a busy machine slows all alike: in one cell, or until time is up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.decode.output import Stats
from selfspec.measure.estimate import Estimate
from selfspec.measure.rounding import Bound, tie_gap, widths_of
from selfspec.measure.stock import bare, read_reference, stepwise_logits
from selfspec.measure.timing import Call
from selfspec.tools.lab.arms import Arm, Cell, Prompts

# Not one of those that are timed.
_WARM_UP_SEED = 2**31

_Item = TypeVar("_Item")


@dataclass
class ArmRun:
    """Calls of an arm in a cell: for each repeat, one for each batch of prompts.

    `absence` says why it did not run; `agreement` compares its greedy texts with those of `model.generate`.
    """

    arm: Arm
    absence: str | None = None
    calls: list[list[Call]] = field(default_factory=list)
    agreement: TextAgreement | None = None

    @property
    def counts(self) -> Stats | None:
        """Counts of all calls together; None if the arm is not selfspec's."""
        stats = [call.stats for calls in self.calls for call in calls if call.stats is not None]
        return Stats.together(stats) if stats else None


def measure(
    model: PreTrainedModel,
    cell: Cell,
    arms: Sequence[Arm],
    prompts: Sequence[Prompts],
    repeats: int,
    warm_up: int,
    tick: Callable[[], None],
) -> list[ArmRun]:
    """Measure all arms in a cell. Greedy texts are compared with those of `model.generate`, where that is the first.

    Every arm first decodes every batch `warm_up` times untimed, so that passes are compiled or recorded when it is
    timed. Then each batch is decoded by one arm after the other, beginning with another one from batch to batch. Draws
    are seeded by repeat and batch. `tick` is called before every call, at most `len(arms) * len(prompts) * (warm_up +
    repeats)` times.
    """
    results = [ArmRun(arm, arm.absence(cell)) for arm in arms]
    # Those of selfspec come last and warm up first: they refuse what they cannot do.
    for result in reversed(results):
        if result.absence is None:
            result.absence = _warmed_up(result.arm, prompts, cell, warm_up, tick)
    running = [result for result in results if result.absence is None]
    for repeat in range(repeats):
        for result in running:
            result.calls.append([])
        for number, batch in enumerate(prompts):
            for result in _beginning_with(running, repeat + number):
                tick()
                result.calls[-1].append(result.arm.decode(batch, cell, seed=repeat * len(prompts) + number))
    if not cell.sampled and running and running[0].arm.spec.kind == "generate":
        for result in running:
            result.agreement = compare(model, _pairs(running[0], result, prompts))
    return results


def _warmed_up(arm: Arm, prompts: Sequence[Prompts], cell: Cell, times: int, tick: Callable[[], None]) -> str | None:
    """Decode untimed; what keeps an arm of `transformers` from it is a reason not to have it, and no more."""
    try:
        for warm_up, batch in product(range(times), prompts):
            tick()
            arm.decode(batch, cell, seed=_WARM_UP_SEED + warm_up)
    except Exception as error:
        if arm.spec.own or arm.spec.kind == "generate":
            raise
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    return None


def _pairs(reference: ArmRun, result: ArmRun, prompts: Sequence[Prompts]) -> list[Pair]:
    """Return pairs of texts of all repeats, since an arm need not write the same every time."""
    return [
        Pair(tuple(prompt), tuple(expected), tuple(found))
        for calls in zip(reference.calls, result.calls, strict=True)
        for asked, stock, own in zip(prompts, *calls, strict=True)
        for prompt, expected, found in zip(asked.rows, stock.rows, own.rows, strict=True)
    ]


def _beginning_with(items: Sequence[_Item], turn: int) -> list[_Item]:
    """Return all items in their order, of which another one is the first in every turn."""
    start = turn % len(items) if items else 0
    return [*items[start:], *items[:start]]


class Runner(Protocol):
    """Decodes a prompt, as an arm does."""

    def decode(self, prompts: Prompts, cell: Cell, seed: int) -> Call:
        """Decode prompts under the conditions of a cell."""


@dataclass(frozen=True)
class Turn:
    """One prompt, by its number, decoded by every arm in every cell."""

    prompt: int
    calls: Mapping[Cell, Sequence[Call]]


@dataclass(frozen=True)
class Score:
    """An arm in a cell, whole calls.

    Attributes:
        speedup: how many times as fast as the first arm on the same prompt in the same turn: the median over turns.
        tokens_per_second: median over turns.
        tokens_per_pass: new tokens for each target pass, over all turns.
        first_seconds: until the first tokens were there, which is what the prompt takes: median over turns.
        decoding: tokens a second after those, median over turns.
    """

    speedup: Estimate
    tokens_per_second: float
    tokens_per_pass: float
    first_seconds: float
    decoding: float


def race(
    arms: Sequence[Runner],
    cells: Sequence[Cell],
    prompts: Sequence[Tensor],
    until: float,
    tick: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Turn]:
    """Let all arms decode one prompt after the other, in turns, until the next turn would end later than `until`.

    Before that each arm decodes one prompt untimed, since passes are recorded when they first run. There is one turn at
    least; one that is not complete when time is up is not counted. Another arm begins from turn to turn; the first of
    all is what the others are compared with. Prompts are `[1, tokens]` each; `tick` is called before each call.
    """
    asked = [Prompts.of_one_length(prompt) for prompt in prompts]
    for arm in reversed(arms):
        tick()
        arm.decode(asked[0], cells[0], seed=0)
    turns: list[Turn] = []
    longest = 0.0
    while not turns or clock() + longest < until:
        started, number = clock(), len(turns) % len(asked)
        calls: dict[Cell, dict[int, Call]] = {cell: {} for cell in cells}
        for cell, arm_number in product(cells, _beginning_with(range(len(arms)), len(turns))):
            if turns and clock() > until:
                return turns
            tick()
            calls[cell][arm_number] = arms[arm_number].decode(asked[number], cell, seed=len(turns))
        turns.append(Turn(number, {cell: [found[arm] for arm in range(len(arms))] for cell, found in calls.items()}))
        longest = max(longest, clock() - started)
    return turns


def scores(turns: Sequence[Turn], cell: Cell) -> list[Score]:
    """Return the score of each arm in a cell."""
    found = []
    for arm in range(len(turns[0].calls[cell])):
        calls = [turn.calls[cell][arm] for turn in turns]
        firsts = [turn.calls[cell][0] for turn in turns]
        speeds = [call.tokens / call.seconds for call in calls]
        ratios = [speed / (first.tokens / first.seconds) for speed, first in zip(speeds, firsts, strict=True)]
        found.append(
            Score(
                Estimate.of_median(ratios),
                statistics.median(speeds),
                sum(call.tokens for call in calls) / sum(call.passes for call in calls),
                statistics.median(call.first_seconds for call in calls),
                statistics.median(_decoding(call) for call in calls),
            )
        )
    return found


def _decoding(call: Call) -> float:
    """Return tokens a second behind the first ones; 0 where the first were all."""
    return (call.tokens - call.first_tokens) / max(call.seconds - call.first_seconds, 1e-9)


def agreements(
    model: PreTrainedModel, turns: Sequence[Turn], cell: Cell, prompts: Sequence[Tensor]
) -> list[TextAgreement]:
    """Compare the greedy texts of each arm with those of the first."""
    asked = [tuple(prompt[0].tolist()) for prompt in prompts]
    every = [(asked[turn.prompt], turn.calls[cell]) for turn in turns]
    return [
        compare(model, [Pair(prompt, tuple(calls[0].rows[0]), tuple(calls[arm].rows[0])) for prompt, calls in every])
        for arm in range(len(turns[0].calls[cell]))
    ]


_HALF = (torch.float16, torch.bfloat16)
# Widths of the passes whose rounding is measured: no arm's blocks are much wider.
_BLOCK = 10


@dataclass(frozen=True)
class TextAgreement:
    """Agreement of an arm's greedy texts with those of `model.generate`: distinct pairs, and equal ones.

    `widest_gap` is the widest gap between the logits of two tokens where texts part, and `near_tie` the widest that
    rounding explains; None where none part, or in float32 and float64, where no gap is an excuse.
    """

    texts: int
    equal: int
    widest_gap: float | None = None
    near_tie: float | None = None

    @property
    def refused(self) -> bool:
        """True if texts differ by more than half precision's rounding explains, so that the arm may not be scored."""
        if self.equal == self.texts:
            return False
        return self.widest_gap is None or self.near_tie is None or self.widest_gap > self.near_tie


class Pair(NamedTuple):
    """A prompt, its new tokens by `model.generate`, and those by an arm."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]
    found: tuple[int, ...]


def compare(model: PreTrainedModel, pairs: Iterable[Pair]) -> TextAgreement:
    """Compare an arm's greedy texts with those of `model.generate`; the same pair counts once."""
    distinct = list(dict.fromkeys(pairs))
    parted = [pair for pair in distinct if pair.expected != pair.found]
    texts, equal = len(distinct), len(distinct) - len(parted)
    # Where texts part one may end sooner; one that only stops early is not the other up to rounding.
    cut = any(_parting(pair) is None for pair in parted)
    if not parted or cut or model.dtype not in _HALF:
        return TextAgreement(texts, equal)
    bound, gaps = Bound(widths_of(_BLOCK)), []
    stock = bare(model)
    stock.generation_config.eos_token_id = None
    for pair in parted:
        prompt = torch.tensor([pair.prompt], device=model.device)
        bound.measure(model, read_reference(stock, prompt, len(pair.expected)))
        # How far the two tokens where the texts part are from a tie, by the model's own one-token passes.
        place = _parting(pair)
        assert place is not None
        logits = stepwise_logits(model, prompt, pair.expected[: place + 1])[-1]
        gaps.append(tie_gap(logits, pair.expected[place], pair.found[place]))
    return TextAgreement(texts, equal, max(gaps), bound.near_tie)


def _parting(pair: Pair) -> int | None:
    """Return the place of the first token that differs; None: one text is the beginning of the other."""
    both = enumerate(zip(pair.expected, pair.found, strict=False))
    return next((index for index, (one, other) in both if one != other), None)
