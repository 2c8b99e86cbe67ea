"""Confirm candidates: real generations in turns with plain decoding, where slow ones drop out early."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from selfspec.api import SelfSpeculative
from selfspec.control import Control, CostAware
from selfspec.draft.registry import draft_name
from selfspec.measure.costs import MeasuredCosts
from selfspec.measure.estimate import Estimate
from selfspec.measure.watch import Watch
from selfspec.tools.calibrate.candidates import Candidate, costs_of
from selfspec.tools.calibrate.measurements import Measurements
from selfspec.tools.lab.arms import ArmSpec, Cell, OwnArm, Prompts
from selfspec.tools.lab.drafts import content
from selfspec.tools.lab.turns import ArmRun, measure

# Arms that go on after the first timed turn, besides plain decoding.
_KEPT = 3
# Turns before the first timed one, in which programs are made of most kinds of passes that will come.
_WARM_UPS = 2


@dataclass(frozen=True)
class Confirmed:
    """A candidate in real generations, timed in so many turns.

    `speedup` is over plain decoding in turns with it, without prefill, in tokens a second over all prompts, with an
    interval over prompts; `mean_accepted_length` counts tokens per target pass of a row.
    """

    name: str
    speedup: Estimate
    acceptance_rate: float | None
    mean_accepted_length: float
    turns: int


@dataclass(frozen=True)
class Trial:
    """Runs of plain decoding, the first, and of candidates in a cell, and what each candidate is worth, fastest first.

    `prompts` are those of each call.
    """

    cell: Cell
    prompts: Sequence[Prompts]
    runs: Sequence[ArmRun]
    confirmed: list[Confirmed]


def confirm(
    plain: SelfSpeculative,
    candidates: Mapping[str, Candidate],
    costs: MeasuredCosts,
    prompts: Sequence[Prompts],
    temperature: float,
    asked: Measurements,
    watch: Watch,
) -> Trial:
    """Generate with each candidate and by plain decoding, in turns.

    All warm up on all prompts. After the first timed turn only the fastest go on. `costs` were measured in such
    batches.
    """
    arms = [OwnArm(ArmSpec("plain"), plain)]
    for each in candidates.values():
        spec = ArmSpec("draft", draft_name(each.draft), nodes=each.nodes, content=content(each.draft))
        arms.append(OwnArm(spec, plain.drafting(each.draft, _control(each, costs, asked))))
    cell, kept = cell_of(prompts, temperature, asked), min(len(candidates), _KEPT)
    watch.begin(len(prompts) * ((_WARM_UPS + 1) * len(arms) + (asked.repeats - 1) * (1 + kept)))
    tick = partial(watch.step, f"confirming drafts, {cell.decoding}")
    runs = measure(plain.model, cell, arms, prompts, 1, _WARM_UPS, tick, seed=asked.seed)
    going = [runs[0], *sorted(runs[1:], key=lambda run: sum(seconds(run, 1)))[:_KEPT]]
    seed = asked.seed + len(prompts)
    going_on = [run.arm for run in going]
    for run, more in zip(
        going, measure(plain.model, cell, going_on, prompts, asked.repeats - 1, 0, tick, seed=seed), strict=True
    ):
        run.calls += more.calls
    confirmed = [beside(runs[0], run, name) for name, run in zip(candidates, runs[1:], strict=True)]
    return Trial(cell, prompts, runs, sorted(confirmed, key=lambda each: each.speedup.value, reverse=True))


def _control(candidate: Candidate, costs: MeasuredCosts, asked: Measurements) -> Control:
    return CostAware(candidate.levels(asked.longest_draft), costs_of(candidate, costs), candidate.nodes)


def cell_of(prompts: Sequence[Prompts], temperature: float, asked: Measurements) -> Cell:
    """Return the conditions of a trial, in which nothing but the settings ends a text."""
    first, longest = prompts[0], max(each.ids.shape[1] for each in prompts)
    return Cell("prompts", temperature, len(first.ids), longest, asked.max_new_tokens)


def beside(plain: ArmRun, run: ArmRun, name: str) -> Confirmed:
    """Compare a candidate with plain decoding in the turns that it took part in."""
    turns = len(run.calls)
    speedup = Estimate.of_ratio(seconds(plain, turns), seconds(run, turns))
    if len(run.calls[0]) == 1:
        # Over a single prompt nothing but its turns says how sure that is.
        pairs = zip(plain.calls, run.calls, strict=False)
        speedup = Estimate.of_median([one[0].seconds_a_token / other[0].seconds_a_token for one, other in pairs])
    counted = [call.stats for calls in run.calls for call in calls if call.stats is not None]
    judged, rounds = sum(each.judged for each in counted), sum(each.row_rounds for each in counted)
    return Confirmed(
        name=name,
        speedup=speedup,
        acceptance_rate=sum(each.accepted for each in counted) / judged if judged else None,
        mean_accepted_length=sum(each.new_tokens for each in counted) / rounds,
        turns=turns,
    )


def seconds(run: ArmRun, turns: int) -> list[float]:
    """Return the seconds of a token by prompt, prefill apart: the median of the first turns."""
    by_prompt = zip(*run.calls[:turns], strict=True)
    return [statistics.median(call.seconds_a_token for call in calls) for calls in by_prompt]
