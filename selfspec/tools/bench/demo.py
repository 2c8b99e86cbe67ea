"""The demonstration, a preset of the benchmark: three arms on given prompts, and whether drafting paid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.measure.cycles import cycle_share
from selfspec.tools.bench.arms import ArmSpec, make_arm
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.measure import ArmRun, measure


@dataclass(frozen=True)
class Demonstration:
    """What was measured at one temperature.

    Attributes:
        arms: `model_generate`; `plain`, selfspec without a draft; and `drafting`, with one.
    """

    arms: Mapping[str, ArmRun]

    @property
    def identical(self) -> list[bool]:
        """For each prompt, whether all arms gave the same tokens in every repeat."""
        repeats = (calls for run in self.arms.values() for calls in run.calls)
        return [len({tuple(call.rows[0]) for call in calls}) == 1 for calls in zip(*repeats, strict=True)]

    @property
    def verdict(self) -> str:
        """Whether drafting paid on this machine: whether a round commits more than it costs in plain steps."""
        drafting, plain = self.arms["drafting"], self._fastest_plain
        speed, total = f"{self._speedup:.2f} times the speed of {plain.arm.spec.name}", drafting.counts
        if min(drafting.tokens_per_second) > max(plain.tokens_per_second):
            return f"Drafting paid on this machine: {speed}."
        if self._speedup > 1 or total is None:
            return f"Drafting made no clear difference on this machine: {speed}, but the ranges of the repeats overlap."
        committed = total.mean_accepted_length
        return (
            f"Drafting did not pay on this machine, it ran at {speed}: a round commits {committed:.2f} tokens but "
            f"costs {committed / self._speedup:.2f} plain steps (acceptance rate {total.acceptance_rate:.2f})."
        )

    def to_dict(self) -> dict[str, Any]:
        """What was measured, ready for JSON."""
        arms = {name: _shown(run) for name, run in self.arms.items()}
        return {**arms, "speedup": self._speedup, "verdict": self.verdict}

    @property
    def _fastest_plain(self) -> ArmRun:
        return max(self.arms["model_generate"], self.arms["plain"], key=_median)

    @property
    def _speedup(self) -> float:
        """Median speed of drafting by that of the fastest plain decoding."""
        return _median(self.arms["drafting"]) / _median(self._fastest_plain)


def _median(run: ArmRun) -> float:
    return median(run.tokens_per_second)


def _shown(run: ArmRun) -> dict[str, Any]:
    speeds, texts = run.tokens_per_second, [call.rows[0] for calls in run.calls for call in calls]
    return {
        "name": run.arm.spec.name,
        "new_tokens": sum(call.tokens for call in run.calls[0]),
        "cycle_share": sum(cycle_share(text) * len(text) for text in texts) / sum(map(len, texts)),
        "tokens_per_second": {"median": _median(run), "lowest": min(speeds), "highest": max(speeds), "repeats": speeds},
        "total": run.counts and run.counts.to_dict(),
    }


def demonstrate(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    draft: ArmSpec,
    max_new_tokens: int,
    temperature: float,
    repeats: int,
    tick: Callable[[], None],
) -> Demonstration:
    """Decode prompts, each `[1, prompt]`, in all three ways, in turns.

    `tick` is called before each of `3 * len(prompts) * (1 + repeats)` steps.
    """
    cell = Cell("demo", temperature, 1, max(prompt.shape[1] for prompt in prompts), max_new_tokens)
    specs = {"model_generate": ArmSpec("generate"), "plain": ArmSpec("plain"), "drafting": draft}
    runs = measure(model, cell, [make_arm(spec, model) for spec in specs.values()], prompts, repeats, 1, tick)
    return Demonstration(dict(zip(specs, runs, strict=True)))
