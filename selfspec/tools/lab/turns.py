"""Run arms in turns on the same prompts, so that a busy machine slows all alike: in one cell, or until time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

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
            for result in beginning_with(running, repeat + number):
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


def beginning_with(items: Sequence[_Item], turn: int) -> list[_Item]:
    """Return all items in their order, of which another one is the first in every turn."""
    start = turn % len(items) if items else 0
    return [*items[start:], *items[:start]]


def race(
    arms: Sequence[Arm],
    cells: Sequence[Cell],
    prompts: Sequence[Prompts],
    until: float,
    tick: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Cell, list[ArmRun]]:
    """Let all arms decode one prompt after the other, in turns, until the next turn would end later than `until`.

    Before that each arm decodes one prompt untimed, since passes are recorded when they first run. There is one turn at
    least; one that is not complete when time is up is not counted, so the last repeat may have fewer calls than there
    are prompts. Another arm begins from turn to turn; `tick` is called before each call.
    """
    for arm in reversed(arms):
        tick()
        arm.decode(prompts[0], cells[0], seed=0)
    found = {cell: [ArmRun(arm) for arm in arms] for cell in cells}
    turns, longest = 0, 0.0
    while not turns or clock() + longest < until:
        started, number, calls = clock(), turns % len(prompts), dict[tuple[Cell, int], Call]()
        for cell, place in product(cells, beginning_with(range(len(arms)), turns)):
            if turns and clock() > until:
                return found
            tick()
            calls[cell, place] = arms[place].decode(prompts[number], cell, seed=turns)
        for (cell, place), call in calls.items():
            repeats = found[cell][place].calls
            if number == 0:
                repeats.append([])
            repeats[-1].append(call)
        turns, longest = turns + 1, max(longest, clock() - started)
    return found


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
