"""Run arms in turns on the same prompts, so that a busy machine slows all alike."""

from __future__ import annotations

import math
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

ENDLESS = 10**6
"""Repeats, where time ends them."""


@dataclass
class ArmRun:
    """Calls of an arm in a cell: for each repeat, one for each batch of prompts.

    `absence` says why it did not run. `refused` is None where nothing was compared; True if its greedy texts are not
    those of `model.generate`, up to what half precision's rounding explains, so that it may not be scored.
    """

    arm: Arm
    absence: str | None = None
    calls: list[list[Call]] = field(default_factory=list)
    refused: bool | None = None


def measure(
    model: PreTrainedModel,
    cell: Cell,
    arms: Sequence[Arm],
    prompts: Sequence[Prompts],
    repeats: int,
    warm_up: int,
    tick: Callable[[], None],
    *,
    seed: int = 0,
    until: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> list[ArmRun]:
    """Measure all arms in a cell. Greedy texts are compared with those of `model.generate`, where that is the first.

    Every arm first decodes every batch `warm_up` times untimed, so that passes are compiled or recorded when it is
    timed. Then each batch is decoded by one arm after the other, beginning with another one from batch to batch. Draws
    are seeded by repeat and batch, on from `seed`. `tick` is called before every call, at most
    `len(arms) * len(prompts) * (warm_up + repeats)` times.

    By the clock no turn of all arms begins that would end later than `until`, but for the first; so the last repeat may
    have fewer calls than there are prompts.
    """
    results = [ArmRun(arm, arm.absence(cell)) for arm in arms]
    # Those of selfspec come last and warm up first: they refuse what they cannot do.
    for result in reversed(results):
        if result.absence is None:
            result.absence = _warmed_up(result.arm, prompts, cell, warm_up, tick)
    running = [result for result in results if result.absence is None]
    longest = 0.0
    for turn in range(repeats * len(prompts)):
        started, (repeat, number) = clock(), divmod(turn, len(prompts))
        if turn and started + longest > until:
            break
        for result in beginning_with(running, repeat + number):
            tick()
            if number == 0:
                result.calls.append([])
            result.calls[-1].append(result.arm.decode(prompts[number], cell, seed=seed + turn))
        longest = max(longest, clock() - started)
    if not cell.sampled and running and running[0].arm.spec.kind == "generate":
        for result in running:
            result.refused = differ(model, _pairs(running[0], result, prompts))
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
        for asked, stock, own in zip(prompts[: len(calls[0])], *calls, strict=True)
        for prompt, expected, found in zip(asked.rows, stock.rows, own.rows, strict=True)
    ]


def beginning_with(items: Sequence[_Item], turn: int) -> list[_Item]:
    """Return all items in their order, of which another one is the first in every turn."""
    start = turn % len(items) if items else 0
    return [*items[start:], *items[:start]]


_HALF = (torch.float16, torch.bfloat16)
# Widths of the passes whose rounding is measured: no arm's blocks are much wider.
_BLOCK = 10


class Pair(NamedTuple):
    """A prompt, its new tokens by `model.generate`, and those by an arm."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]
    found: tuple[int, ...]


def differ(model: PreTrainedModel, pairs: Iterable[Pair]) -> bool:
    """Return whether an arm's greedy texts differ from those of `model.generate` by more than rounding explains.

    It excuses tokens of half precision that are nearly tied where texts part; in float32 and float64 nothing.
    """
    parted = {pair: _parting(pair) for pair in pairs if pair.expected != pair.found}
    # Where texts part one may end sooner; one that only stops early is not the other up to rounding.
    if not parted or None in parted.values() or model.dtype not in _HALF:
        return bool(parted)
    bound, gaps = Bound(widths_of(_BLOCK)), []
    stock = bare(model)
    stock.generation_config.eos_token_id = None
    for pair, place in parted.items():
        assert place is not None
        prompt = torch.tensor([pair.prompt], device=model.device)
        bound.measure(model, read_reference(stock, prompt, len(pair.expected)))
        # How far the two tokens where the texts part are from a tie, by the model's own one-token passes.
        logits = stepwise_logits(model, prompt, pair.expected[: place + 1])[-1]
        gaps.append(tie_gap(logits, pair.expected[place], pair.found[place]))
    return max(gaps) > bound.near_tie


def _parting(pair: Pair) -> int | None:
    """Return the place of the first token that differs; None: one text is the beginning of the other."""
    both = enumerate(zip(pair.expected, pair.found, strict=False))
    return next((index for index, (one, other) in both if one != other), None)
