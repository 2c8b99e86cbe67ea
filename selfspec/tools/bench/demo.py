"""The demonstration, a preset of the benchmark: three arms on given prompts, and whether drafting paid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.measure.cycles import cycle_share
from selfspec.measure.peak_memory import peak_memory
from selfspec.tools.bench.arms import Arm, ArmSpec, make_arm
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.measure import ArmRun, measure

# Below it a draft is mostly wasted.
_LOW_ACCEPTANCE = 0.6


@dataclass(frozen=True)
class Demonstration:
    """What was measured at one temperature.

    Attributes:
        arms: `model_generate`; `plain`, selfspec without a draft; and `drafting`, with one.
        peak_bytes: of each, memory above the level before, over all prompts; None where unknown.
        parameters: of the model.
    """

    arms: Mapping[str, ArmRun]
    peak_bytes: Mapping[str, int | None]
    parameters: int

    @property
    def identical(self) -> list[bool]:
        """For each prompt, whether all arms gave the same tokens in every repeat."""
        repeats = (calls for run in self.arms.values() for calls in run.calls)
        return [len({tuple(call.rows[0]) for call in calls}) == 1 for calls in zip(*repeats, strict=True)]

    @property
    def verdict(self) -> str:
        """Whether drafting paid on this machine: whether a round commits more than it costs in plain steps."""
        drafting, plain, speedup = self.arms["drafting"], self._fastest_plain, self._speedup
        total, name = drafting.counts, plain.arm.spec.name
        if min(drafting.tokens_per_second) > max(plain.tokens_per_second):
            return f"Drafting paid on this machine: {speedup:.2f} times the speed of {name}."
        if speedup > 1 or total is None:
            return (
                f"Drafting made no clear difference on this machine: {speedup:.2f} times the speed of {name} at the "
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
            f"Drafting did not pay on this machine, it ran at {speedup:.2f} times the speed of {name}: a round "
            f"commits {total.mean_accepted_length:.2f} tokens but costs as much as {round_cost:.2f} plain steps "
            f"({steps_cost}{round_cost * (1 - draft_share):.2f} for the rest), because in a model of "
            f"{self.parameters / 1e6:.2f}M parameters a step is mostly Python's overhead for each layer, which the "
            f"draft saves little of{untrained}."
        )

    def to_dict(self) -> dict[str, Any]:
        """What was measured, ready for JSON."""
        arms = {name: _shown(run, self.peak_bytes[name]) for name, run in self.arms.items()}
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


def _shown(run: ArmRun, peak: int | None) -> dict[str, Any]:
    speeds, texts = run.tokens_per_second, [call.rows[0] for calls in run.calls for call in calls]
    return {
        "name": run.arm.spec.name,
        "new_tokens": sum(call.tokens for call in run.calls[0]),
        "cycle_share": sum(cycle_share(text) * len(text) for text in texts) / sum(map(len, texts)),
        "tokens_per_second": {"median": _median(run), "lowest": min(speeds), "highest": max(speeds), "repeats": speeds},
        "peak_bytes": peak,
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
    """Decode each prompt in all three ways, in turns, and measure the memory of each way in one more run.

    Args:
        model: of a supported architecture.
        prompts: each `[1, prompt]`.
        draft: the arm that drafts.
        max_new_tokens: tokens of each text; nothing ends one early.
        temperature: 0 decodes greedily.
        repeats: how often each way is timed, at least 1.
        tick: called before each of `3 * (len(prompts) * (1 + repeats) + 1)` steps.

    Raises:
        DraftConfigError, PromptError: before any forward pass.
    """
    cell = Cell("demo", temperature, 1, max(prompt.shape[1] for prompt in prompts), max_new_tokens)
    specs = {"model_generate": ArmSpec("generate"), "plain": ArmSpec("plain"), "drafting": draft}
    runs = measure(model, cell, [make_arm(spec, model) for spec in specs.values()], prompts, repeats, 1, tick)
    arms, peaks = dict(zip(specs, runs, strict=True)), {}

    def decode_all(arm: Arm) -> None:
        for prompt in prompts:
            arm.decode(prompt, cell, seed=0)

    for name, run in arms.items():
        tick()
        peaks[name] = peak_memory(partial(decode_all, run.arm), model.device)
    return Demonstration(arms, peaks, model.num_parameters())
