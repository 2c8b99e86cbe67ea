"""The demonstration, a preset of the benchmark: three arms on given prompts, and whether drafting paid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.decode.stats import Stats
from selfspec.measure.cycles import cycle_share
from selfspec.measure.peak_memory import peak_memory
from selfspec.tools.bench.arm import ArmKind, ArmSpec
from selfspec.tools.bench.arms import make_arm
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.measure import ArmRun, measure, runs

_ARMS = 3
# Below it a draft is mostly wasted.
_LOW_ACCEPTANCE = 0.6


@dataclass(frozen=True)
class Shown:
    """What the demonstration shows of an arm.

    Attributes:
        name: of the arm.
        texts: of each prompt the new tokens of every repeat.
        tokens_per_second: one value for each repeat, over all prompts.
        total: counts of all calls; None of `model.generate`, which keeps none.
        peak_bytes: memory above the level before, over all prompts; None where unknown.
    """

    name: str
    texts: list[list[list[int]]]
    tokens_per_second: list[float]
    total: Stats | None = None
    peak_bytes: int | None = None

    @classmethod
    def of(cls, measured: ArmRun) -> Shown:
        """What was measured of an arm."""
        stats = [call.stats for calls in measured.calls for call in calls if call.stats is not None]
        return cls(
            name=measured.arm.spec.name,
            texts=[[call.rows[0] for call in calls] for calls in zip(*measured.calls, strict=True)],
            tokens_per_second=[
                sum(call.tokens for call in calls) / sum(call.seconds for call in calls) for calls in measured.calls
            ],
            total=Stats.together(stats) if stats else None,
        )

    @property
    def median(self) -> float:
        """Median tokens per second."""
        return median(self.tokens_per_second)

    @property
    def new_tokens(self) -> int:
        """New tokens of all prompts."""
        return sum(len(repeats[0]) for repeats in self.texts)

    @property
    def cycle_share(self) -> float:
        """Share of the new tokens inside repeating cycles, which flatter any draft."""
        texts = [text for repeats in self.texts for text in repeats]
        return sum(cycle_share(text) * len(text) for text in texts) / sum(map(len, texts))

    def to_dict(self) -> dict[str, Any]:
        """What was measured, ready for JSON."""
        return {
            "new_tokens": self.new_tokens,
            "cycle_share": self.cycle_share,
            "tokens_per_second": {
                "median": self.median,
                "lowest": min(self.tokens_per_second),
                "highest": max(self.tokens_per_second),
                "repeats": self.tokens_per_second,
            },
            "peak_bytes": self.peak_bytes,
            "total": None if self.total is None else self.total.to_dict(),
        }


@dataclass(frozen=True)
class Demonstration:
    """What was measured at one temperature.

    Attributes:
        stock: `model.generate`.
        plain: selfspec without a draft.
        drafting: selfspec with one.
    """

    stock: Shown
    plain: Shown
    drafting: Shown

    @property
    def arms(self) -> tuple[Shown, Shown, Shown]:
        """All three."""
        return self.stock, self.plain, self.drafting

    @property
    def identical(self) -> list[bool]:
        """For each prompt, whether all arms gave the same tokens in every repeat."""
        prompts = zip(*(arm.texts for arm in self.arms), strict=True)
        return [len({tuple(text) for repeats in arms for text in repeats}) == 1 for arms in prompts]

    @property
    def fastest_plain(self) -> Shown:
        """The faster of the two that do not draft."""
        return max(self.stock, self.plain, key=lambda arm: arm.median)

    @property
    def speedup(self) -> float:
        """Median speed of drafting by that of the fastest plain decoding."""
        return self.drafting.median / self.fastest_plain.median


def steps(prompts: int, repeats: int) -> int:
    """How many steps `demonstrate` takes."""
    return runs(_ARMS, prompts, repeats, 1) + _ARMS


def demonstrate(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    draft: str,
    draft_length: int | None,
    max_new_tokens: int,
    temperature: float,
    repeats: int,
    tick: Callable[[], None],
) -> Demonstration:
    """Decode each prompt in all three ways, in turns, and measure the memory of each way in one more run.

    Args:
        model: of a supported architecture.
        prompts: each `[1, prompt]`.
        draft: what drafts, by name.
        draft_length: tokens drafted each round; None: as many as pay.
        max_new_tokens: tokens of each text; nothing ends one early, so that all arms do the same work.
        temperature: 0 decodes greedily.
        repeats: how often each way is timed, at least 1.
        tick: called after each of `steps(len(prompts), repeats)` steps.

    Raises:
        DraftConfigError, PromptError: before any forward pass.
    """
    cell = Cell("demo", temperature, 1, max(prompt.shape[1] for prompt in prompts), max_new_tokens)
    specs = [ArmSpec(ArmKind.GENERATE), ArmSpec(ArmKind.PLAIN), ArmSpec(ArmKind.DRAFT, draft, length=draft_length)]
    shown = []
    for measured in measure(model, cell, [make_arm(spec, model) for spec in specs], prompts, repeats, 1, tick):
        decode = measured.arm.decode
        peak = peak_memory(
            lambda decode=decode: [decode(prompt, cell, seed=0) for prompt in prompts],  # type: ignore[misc]
            model.device,
        )
        tick()
        shown.append(replace(Shown.of(measured), peak_bytes=peak))
    stock, plain, drafting = shown
    return Demonstration(stock, plain, drafting)


def verdict(found: Demonstration, parameters: int) -> str:
    """Say whether drafting paid on this machine.

    Drafting pays where a round commits more tokens than it costs in steps of plain decoding.

    Args:
        found: what was measured.
        parameters: of the model.
    """
    plain, drafting, speedup, total = found.fastest_plain, found.drafting, found.speedup, found.drafting.total
    if min(drafting.tokens_per_second) > max(plain.tokens_per_second):
        return f"Drafting paid on this machine: {speedup:.2f} times the speed of {plain.name}."
    if speedup > 1 or total is None:
        return (
            f"Drafting made no clear difference on this machine: {speedup:.2f} times the speed of {plain.name} at the "
            "median, but the ranges of the repeats overlap."
        )
    round_cost = total.mean_accepted_length / speedup
    draft_share, drafted = total.seconds["draft"] / sum(total.seconds.values()), total.drafted / total.row_rounds
    steps_cost = f"{drafted:.1f} draft steps at {round_cost * draft_share / drafted:.2f} each, " if drafted else ""
    untrained = (
        f", and its layers were not trained to be left out (acceptance rate {total.acceptance_rate:.2f})"
        if total.acceptance_rate < _LOW_ACCEPTANCE
        else ""
    )
    return (
        f"Drafting did not pay on this machine, it ran at {speedup:.2f} times the speed of {plain.name}: a round "
        f"commits {total.mean_accepted_length:.2f} tokens but costs as much as {round_cost:.2f} plain steps "
        f"({steps_cost}{round_cost * (1 - draft_share):.2f} for the rest), because in a model of "
        f"{parameters / 1e6:.2f}M parameters a step is mostly Python's overhead for each layer, which the draft saves "
        f"little of{untrained}."
    )
