"""Confirm candidates: real generations in turns with plain decoding, where slow ones drop out early."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from selfspec.api import SelfSpeculative
from selfspec.control import CostAware
from selfspec.decode.output import Stats
from selfspec.draft.registry import PLAIN
from selfspec.measure.costs import MeasuredCosts
from selfspec.measure.estimate import Estimate
from selfspec.measure.watch import Watch
from selfspec.tools.calibrate.candidates import Candidate, costs_of
from selfspec.tools.calibrate.measurements import Measurements
from selfspec.tools.lab.arms import Prompts
from selfspec.tools.lab.turns import beginning_with

# Arms that go on after the first timed turn, besides plain decoding.
_KEPT = 3
# Turns before the first timed one, in which programs are made of most kinds of passes that will come.
_WARM_UPS = 2


@dataclass(frozen=True)
class TimedCall:
    """One timed generation: its prompt, or batch, its turn, its counts, and its seconds without prefill."""

    prompt: int
    turn: int
    new_tokens: int
    row_rounds: int
    judged: int
    accepted: int
    seconds: float


@dataclass(frozen=True)
class Confirmed:
    """A candidate in real generations, timed in so many turns.

    `speedup` is over plain decoding in turns with it, without prefill, in tokens a second over all prompts, with a
    bootstrap interval over prompts; `mean_accepted_length` counts tokens per target pass of a row.
    """

    name: str
    speedup: Estimate
    acceptance_rate: float | None
    mean_accepted_length: float
    turns: int
    calls: list[TimedCall] = field(default_factory=list)


@dataclass(frozen=True)
class _Arm:
    """A way of decoding, and the counts of its timed generations, by prompt and turn."""

    name: str
    spec: SelfSpeculative
    turns: list[list[Stats]]

    def seconds(self, turns: int) -> list[float]:
        """Return the seconds of a token by prompt, prefill apart: the median of the first turns."""
        return [statistics.median(map(_seconds_a_token, each[:turns])) for each in self.turns]

    def beside(self, plain: _Arm) -> Confirmed:
        """Compare it with plain decoding in the turns that it took part in."""
        counted = [stats for each in self.turns for stats in each]
        judged, turns = sum(stats.judged for stats in counted), len(self.turns[0])
        speedup = Estimate.of_ratio(plain.seconds(turns), self.seconds(turns))
        if len(self.turns) == 1:
            # Over a single prompt nothing but its turns says how sure that is.
            pairs = zip(plain.turns[0], self.turns[0], strict=False)
            speedup = Estimate.of_median([_seconds_a_token(one) / _seconds_a_token(other) for one, other in pairs])
        return Confirmed(
            name=self.name,
            speedup=speedup,
            acceptance_rate=sum(stats.accepted for stats in counted) / judged if judged else None,
            mean_accepted_length=sum(stats.new_tokens for stats in counted)
            / sum(stats.row_rounds for stats in counted),
            turns=turns,
            calls=[
                TimedCall(prompt, turn, each.new_tokens, each.row_rounds, each.judged, each.accepted, _seconds(each))
                for prompt, by_turn in enumerate(self.turns)
                for turn, each in enumerate(by_turn)
            ],
        )


def confirm(
    plain: SelfSpeculative,
    candidates: Mapping[str, Candidate],
    costs: MeasuredCosts,
    prompts: Sequence[Mapping[str, Any]],
    temperature: float,
    asked: Measurements,
    progress: Watch,
) -> list[Confirmed]:
    """Generate with each candidate and by plain decoding, in turns; return the candidates, fastest first.

    All warm up on all prompts. After the first timed turn only the fastest go on. `costs` were measured in such
    batches.
    """
    reference = _Arm(PLAIN, plain, [[] for _ in prompts])
    arms = [
        _Arm(name, plain.drafting(each.draft, _control(each, costs, asked)), [[] for _ in prompts])
        for name, each in candidates.items()
    ]
    kept = min(len(arms), _KEPT)
    progress.begin(len(prompts) * ((_WARM_UPS + 1) * (1 + len(arms)) + (asked.repeats - 1) * (1 + kept)))
    going = arms
    for turn in range(-_WARM_UPS, asked.repeats):
        for number, prompt in enumerate(prompts):
            for arm in beginning_with([reference, *going], turn + number):
                progress.step(f"confirming {arm.name} at temperature {temperature:g}")
                stats = _generated(arm.spec, prompt, temperature, asked, asked.seed + number)
                if turn >= 0:
                    arm.turns[number].append(stats)
        if turn == 0:
            going = sorted(arms, key=lambda arm: sum(arm.seconds(1)))[:_KEPT]
    return sorted((arm.beside(reference) for arm in arms), key=lambda each: each.speedup.value, reverse=True)


def _control(candidate: Candidate, costs: MeasuredCosts, asked: Measurements) -> CostAware:
    return CostAware(candidate.levels(asked.longest_draft), costs_of(candidate, costs), candidate.nodes)


def batches(prompts: Sequence[Tensor], rows: int, texts: int = 1) -> list[dict[str, Any]]:
    """Return prompts, `[1, prompt]` each, in batches as keywords of a generation: left-padded ids, and their mask.

    A batch has `rows`, and all together at least `texts`. Where prompts do not fill the last batch they come again,
    each a token shorter than before: rows that are the same would stay in step, as those of a real batch do not.
    """
    grouped = []
    for start in range(0, max(len(prompts), texts), rows):
        group = []
        for times, number in (divmod(row, len(prompts)) for row in range(start, start + rows)):
            prompt = prompts[number]
            group.append(prompt[:, : max(1, prompt.shape[1] - times)])
        padded = Prompts.padded(group)
        grouped.append({"input_ids": padded.ids, "attention_mask": padded.mask})
    return grouped


def generation_options(temperature: float, asked: Measurements) -> dict[str, Any]:
    """Return the keywords of a generation whose length nothing but the settings decides."""
    sampled = {"temperature": temperature, "top_k": 0} if temperature > 0 else {}
    return {"max_new_tokens": asked.max_new_tokens, "eos_token_id": None, "do_sample": temperature > 0, **sampled}


def _generated(
    spec: SelfSpeculative, prompt: Mapping[str, Any], temperature: float, asked: Measurements, seed: int
) -> Stats:
    # A prompt comes again in every turn, and would be drafted from what was written the last time.
    spec.forget()
    return spec.generate(**prompt, seed=seed, **generation_options(temperature, asked)).stats


def _seconds(stats: Stats) -> float:
    return sum(seconds for phase, seconds in stats.seconds.items() if phase != "prefill")


def _seconds_a_token(stats: Stats) -> float:
    return _seconds(stats) / stats.new_tokens
