"""Measuring a cell: all arms in turns on the same prompts, so that a busy machine troubles all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.measure.timing import Call
from selfspec.tools.bench.agreement import Pair, TextAgreement, compare
from selfspec.tools.bench.arm import Arm, ArmKind
from selfspec.tools.bench.cell import Cell

# Not one of those that are timed.
_WARM_UP_SEED = 2**31


@dataclass
class ArmRun:
    """What an arm did in a cell.

    Attributes:
        arm: which.
        absence: why it did not run; None where it did.
        calls: for each repeat, one for each batch of prompts.
        agreement: of its greedy texts with those of `model.generate`; None for sampled ones.
    """

    arm: Arm
    absence: str | None = None
    calls: list[list[Call]] = field(default_factory=list)
    agreement: TextAgreement | None = None


def measure(
    model: PreTrainedModel,
    cell: Cell,
    arms: Sequence[Arm],
    prompts: Sequence[Tensor],
    repeats: int,
    warm_up: int,
    tick: Callable[[], None],
) -> list[ArmRun]:
    """Measure all arms in a cell.

    Every arm first decodes every batch some times untimed: what is compiled or traced on the way is there when it is
    timed. Then each batch is decoded by one arm after the other; which of them begins changes from batch to batch. What
    is drawn is seeded by repeat and batch.

    Args:
        model: stock.
        cell: how to decode.
        arms: `model.generate` first: the others' greedy texts are compared with its.
        prompts: one `[batch, context]` for each call.
        repeats: how often each is timed.
        warm_up: how often each decodes all prompts before, at least 1.
        tick: called after every call, `runs(...)` times at most.

    Raises:
        SelfSpecError: an arm of selfspec's cannot do it.
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
            turn = (repeat + number) % len(running)
            for result in running[turn:] + running[:turn]:
                result.calls[-1].append(result.arm.decode(batch, cell, seed=repeat * len(prompts) + number))
                tick()
    if not cell.sampled:
        for result in running:
            result.agreement = compare(model, _pairs(running[0], result, prompts))
    return results


def runs(arms: int, batches: int, repeats: int, warm_up: int) -> int:
    """The most calls that measuring a cell makes."""
    return arms * batches * (warm_up + repeats)


def _warmed_up(arm: Arm, prompts: Sequence[Tensor], cell: Cell, times: int, tick: Callable[[], None]) -> str | None:
    """Decode untimed; what keeps an arm of `transformers` from it is a reason not to have it, and no more."""
    try:
        for time, batch in product(range(times), prompts):
            arm.decode(batch, cell, seed=_WARM_UP_SEED + time)
            tick()
    except Exception as error:
        if arm.spec.kind in (ArmKind.GENERATE, ArmKind.PLAIN, ArmKind.DRAFT):
            raise
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    return None


def _pairs(reference: ArmRun, result: ArmRun, prompts: Sequence[Tensor]) -> list[Pair]:
    """Distinct pairs of texts: of all repeats, since an arm need not say the same every time."""
    pairs: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], Pair] = {}
    for expected_calls, found_calls in zip(reference.calls, result.calls, strict=True):
        for number, (expected, found) in enumerate(zip(expected_calls, found_calls, strict=True)):
            for row, texts in enumerate(zip(expected.rows, found.rows, strict=True)):
                key = (number, row, tuple(texts[0]), tuple(texts[1]))
                pairs.setdefault(key, Pair(prompts[number][row : row + 1], *texts))
    return list(pairs.values())
