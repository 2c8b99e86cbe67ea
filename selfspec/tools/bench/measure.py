"""Measuring a cell: all arms in turns on the same prompts, so that a busy machine troubles all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.decode.stats import Stats
from selfspec.measure.timing import Call
from selfspec.tools.bench.agreement import Pair, TextAgreement, compare
from selfspec.tools.bench.arms import Arm
from selfspec.tools.bench.cell import Cell

# Not one of those that are timed.
_WARM_UP_SEED = 2**31


@dataclass
class ArmRun:
    """What an arm did in a cell.

    Attributes:
        absence: why it did not run; None where it did.
        calls: for each repeat, one for each batch of prompts.
        agreement: of its greedy texts with those of `model.generate`; None for sampled ones.
    """

    arm: Arm
    absence: str | None = None
    calls: list[list[Call]] = field(default_factory=list)
    agreement: TextAgreement | None = None

    @property
    def counts(self) -> Stats | None:
        """Those of all calls together; None of an arm that is not selfspec's."""
        stats = [call.stats for calls in self.calls for call in calls if call.stats is not None]
        return Stats.together(stats) if stats else None

    @property
    def tokens_per_second(self) -> list[float]:
        """Of each repeat, over whole calls."""
        return [sum(call.tokens for call in calls) / sum(call.seconds for call in calls) for calls in self.calls]


def measure(
    model: PreTrainedModel,
    cell: Cell,
    arms: Sequence[Arm],
    prompts: Sequence[Tensor],
    repeats: int,
    warm_up: int,
    tick: Callable[[], None],
) -> list[ArmRun]:
    """Measure all arms in a cell, `model.generate` first: the others' greedy texts are compared with its.

    Every arm first decodes every batch some times untimed: what is compiled or traced on the way is there when it is
    timed. Then each batch is decoded by one arm after the other; which of them begins changes from batch to batch. What
    is drawn is seeded by repeat and batch.

    Prompts are `[batch, context]`, one for each call. `tick` is called before every call, at most
    `len(arms) * len(prompts) * (warm_up + repeats)` times.
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
                tick()
                result.calls[-1].append(result.arm.decode(batch, cell, seed=repeat * len(prompts) + number))
    if not cell.sampled:
        for result in running:
            result.agreement = compare(model, _pairs(running[0], result, prompts))
    return results


def _warmed_up(arm: Arm, prompts: Sequence[Tensor], cell: Cell, times: int, tick: Callable[[], None]) -> str | None:
    """Decode untimed; what keeps an arm of `transformers` from it is a reason not to have it, and no more."""
    try:
        for time, batch in product(range(times), prompts):
            tick()
            arm.decode(batch, cell, seed=_WARM_UP_SEED + time)
    except Exception as error:
        if arm.spec.own or arm.spec.kind == "generate":
            raise
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    return None


def _pairs(reference: ArmRun, result: ArmRun, prompts: Sequence[Tensor]) -> list[Pair]:
    """Pairs of texts of all repeats, since an arm need not say the same every time."""
    return [
        Pair(tuple(prompt), tuple(expected), tuple(found))
        for calls in zip(reference.calls, result.calls, strict=True)
        for ids, stock, own in zip(prompts, *calls, strict=True)
        for prompt, expected, found in zip(ids.tolist(), stock.rows, own.rows, strict=True)
    ]
