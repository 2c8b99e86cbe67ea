"""Measure the parts of a round on this machine: c, V(m) and o, on the passes and rounds of real generations.

The unit is the time of one round of plain decoding. A generation decodes plainly, and before each of its rounds every
drafter drafts and `verify` runs at every width, over the cache of that generation: these times are c and V. Whatever is
compared is timed within the same moments. o is the time that a round with a draft takes beside its draft and its target
pass; rounds with a draft are timed in turns with plain ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.api import SelfSpeculative, wrap
from selfspec.architecture import Adapter
from selfspec.cache.tree import Tree
from selfspec.control.costs import Costs
from selfspec.decode.batch import Batch
from selfspec.decode.generation import Generation
from selfspec.decode.loop import verify
from selfspec.device import Timer
from selfspec.draft import Budget, Draft, Drafter, Proposer, RowsView, Stateless
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import PLAIN, draft_name
from selfspec.errors import DraftConfigError
from selfspec.measure.estimate import Estimate
from selfspec.measure.stock import bare
from selfspec.measure.watch import Watch
from selfspec.runtime import Eager, Native

WIDTHS = (1, 2, 3, 4, 5, 6, 8)
LENGTHS = (1, 3, 7)
# Generations that show what rounds do beside draft and target pass, and rounds of each.
_GENERATIONS, _ROUNDS = 3, 6
_SEED = 0


@dataclass(frozen=True)
class MeasuredCosts:
    """Measured terms of the speed-up formula after Leviathan et al. (2023).

    Drafts go by their `draft_name`. `none` is a draft that takes no step and is verified from tokens on, as look-ups
    are: its rounds are a target pass and o.

    Attributes:
        step_seconds: seconds of a round of plain decoding, the unit below.
        draft: c of each draft: a draft step, head included.
        verify: V(m) of each draft by m: the time between draft and verdict with m tokens to verify, in target passes
            over one token. A draft whose work is exact up to some sublayer has its own V: the target pass resumes
            there.
        overhead: o of each draft: all else in a round that drafts, beyond what V times a plain round already counts of
            it; at the middle one of `lengths`. It may be negative.
        out_of_step: a round of plain decoding over rows at different places, in rounds over rows at the same place.
    """

    step_seconds: Estimate
    draft: Mapping[str, Estimate]
    verify: Mapping[str, Mapping[int, Estimate]]
    overhead: Mapping[str, Estimate]
    context: int
    batch: int
    lengths: tuple[int, ...]
    out_of_step: Estimate | None = None

    def of(self, name: str) -> Costs:
        """Return the costs of one draft for the formula and the control: V as a line through what was measured."""
        measured = self.verify[name]
        widths, values = list(measured), [estimate.value for estimate in measured.values()]
        slope, intercept = (0.0, values[0]) if len(widths) == 1 else statistics.linear_regression(widths, values)
        # A pass over more tokens does not cost less; where it looks so, it is noise.
        widening = max(slope, 0.0)
        # Nor does one over a single token cost next to nothing, as a steep line through wider ones may say.
        verify = max(intercept + slope, min(values) / 2) if slope > 0 else statistics.mean(values)
        costs = Costs(self.draft[name].value, verify, widening, self.overhead[name].value, rows=self.batch)
        # Rows at different places are not the faster ones; where it looks so, it is noise.
        return costs if self.out_of_step is None else replace(costs, out_of_step=max(self.out_of_step.value, 1.0))

    def to_dict(self) -> dict[str, Any]:
        by_width = {name: {str(width): asdict(each) for width, each in at.items()} for name, at in self.verify.items()}
        return {**asdict(self), "verify": by_width}


def measure_costs(
    model: PreTrainedModel,
    adapter: Adapter,
    drafters: Sequence[LayerPathDrafter],
    widths: Sequence[int] = WIDTHS,
    context: int = 128,
    repeats: int = 9,
    *,
    lengths: Sequence[int] = LENGTHS,
    batch: int = 1,
    temperature: float = 0.0,
    warm_up: int = 4,
    base: SelfSpeculative | None = None,
    watch: Watch | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> MeasuredCosts:
    """Measure what a plain step, draft steps, target passes and all else in a round cost.

    Everything is warmed up, timed in turns, synchronised with the device, and summed up by medians of ratios to what
    was timed beside it. The model is left as it is. Look-ups need no measuring: see `MeasuredCosts`.

    Target passes from tokens on read `widths` of them; drafts are timed at `lengths`. The context is cut to what the
    model has room for. With several rows, rounds are also timed in which every other row is one token behind. A
    warm-up of 4 is enough to record passes. `base` is a wrapper of the model whose recorded passes are used and added
    to; None: one that records at once.

    Raises:
        DraftConfigError: a draft does not fit the model, two have one name, or a number is out of range.
    """
    named = _named(drafters)
    progress = watch or Watch()
    rounds, middle = repeats + warm_up, sorted(lengths)[len(lengths) // 2]
    progress.begin(rounds * (2 if batch > 1 else 1) + _GENERATIONS * (1 + len(named)))
    timed = {1, *widths}
    longest = max(*lengths, *[width - 1 for width in timed])
    bench = _Bench(
        base or wrap(bare(model), adapter=adapter, runtime=Native(after=0)),
        _prompt(model, batch, context, rounds + _ROUNDS * (middle + 1) + longest),
        temperature,
        clock,
        warm_up,
    )
    probe = Probe(named, sorted(timed), sorted(set(lengths)), bench.timer)
    samples = bench.probed(probe, longest, rounds, progress)
    # A plain round in passes over one token: of these there are several to compare with, of it only one.
    plain = statistics.median(sample.plain / sample.unit for sample in samples)
    draft = {
        name: Estimate.of_median([steps / plain for each in samples for steps in each.steps(name)]) for name in named
    }
    draft[PLAIN] = Estimate(0.0, 0.0, 0.0)
    verify = {
        name: {m: Estimate.of_median([each.verify[name][m] / each.unit for each in samples]) for m in by_width}
        for name, by_width in samples[0].verify.items()
    }
    verify[PLAIN][1] = Estimate.of_median([1.0])
    step_seconds = Estimate.of_median([sample.plain for sample in samples])
    overhead = {}
    for name, drafter in {PLAIN: Repeating(), **named}.items():
        widths = sorted(verify[name])
        # Interpolated between measured widths, outside them that of the nearest.
        passes = float(np.interp(middle + 1, widths, [verify[name][each].value for each in widths]))
        rests = []
        for _ in range(_GENERATIONS):
            progress.step(f"what else rounds do, {name}")
            # A difference of two medians, which noise may take below nothing.
            rests.append(max(0.0, bench.rest(drafter, middle, passes) / step_seconds.value))
        overhead[name] = Estimate.of_median(rests)
    return MeasuredCosts(
        step_seconds=step_seconds,
        draft=draft,
        verify=verify,
        overhead=overhead,
        context=bench.prompt.shape[1],
        batch=batch,
        lengths=tuple(sorted(set(lengths))),
        out_of_step=bench.out_of_step(rounds, progress) if batch > 1 else None,
    )


class _Bench:
    """Runs real generations from `[batch, context]` tokens, timed round by round after `warm_up` rounds."""

    def __init__(
        self, base: SelfSpeculative, prompt: Tensor, temperature: float, clock: Callable[[], float], warm_up: int
    ) -> None:
        self.prompt = prompt
        self.timer = Timer(clock, prompt.device)
        self._base, self._warm_up = base, warm_up
        # How passes are run is of no account where they are not timed.
        self._eager = wrap(base.model, adapter=base.adapter, runtime=Eager())
        # Nothing may end a text early.
        self._options: dict[str, Any] = {"do_sample": temperature > 0, "eos_token_id": None}
        if temperature > 0:
            self._options |= {"temperature": temperature, "top_k": 0}

    def probed(self, probe: Probe, longest: int, rounds: int, progress: Watch) -> list[Sample]:
        """Return the timings of a probe in the rounds of one generation, and the seconds of each round by itself."""
        generation = self._begin(self._base.drafting(probe, longest), rounds + longest + 1, self.prompt)
        samples = []
        for _ in range(rounds):
            progress.step("draft steps and target passes")
            seconds = self.timer.of(lambda: next(generation))
            probe.sample.plain = seconds - probe.sample.probing
            samples.append(probe.sample)
        generation.close()
        return samples[self._warm_up :]

    def out_of_step(self, rounds: int, progress: Watch) -> Estimate:
        """Compare plain rounds, every other row one token behind, with rounds over rows at one place."""
        longer = torch.nn.functional.pad(self.prompt, (1, 0))
        mask = torch.ones_like(longer)
        mask[::2, 0] = 0
        alike, behind = self._begin(self._base, rounds, self.prompt), self._begin(self._base, rounds, longer, mask)
        ratios = []
        for number in range(rounds):
            progress.step("rows at different places")
            # Neither always comes after the other.
            pair = (alike, behind) if number % 2 else (behind, alike)
            seconds = {id(each): self.timer.of(partial(next, each)) for each in pair}
            ratios.append(seconds[id(behind)] / seconds[id(alike)])
        alike.close()
        behind.close()
        return Estimate.of_median(ratios[self._warm_up :])

    def rest(self, drafter: Drafter, length: int, passes: float) -> float:
        """Return the seconds of a round beside draft and passes, less those that V (`passes`) has counted."""
        # Room for whole drafts to the last round.
        room = _ROUNDS * (length + 1) + 1
        plain = self._begin(self._eager, room, self.prompt)
        drafting = self._begin(self._eager.drafting(drafter, length), room, self.prompt)
        for _ in range(_ROUNDS):
            next(plain)
            next(drafting)
        return _rest(drafting) - passes * _rest(plain)

    def _begin(self, spec: SelfSpeculative, room: int, prompt: Tensor, mask: Tensor | None = None) -> Generation:
        mask = torch.ones_like(prompt) if mask is None else mask
        return spec.stream(prompt, mask, max_new_tokens=room, seed=_SEED, **self._options)


def _rest(generation: Generation) -> float:
    generation.close()
    stats = generation.stats
    return (stats.seconds["accept"] + stats.seconds["commit"]) / stats.rounds


def _named(drafters: Sequence[LayerPathDrafter]) -> dict[str, LayerPathDrafter]:
    named = {draft_name(drafter): drafter for drafter in drafters}
    if len(named) < len(drafters):
        raise DraftConfigError("two drafts to be measured have one name; name each once")
    wrong = [drafter for drafter in drafters if not isinstance(drafter, LayerPathDrafter)]
    if wrong:
        raise DraftConfigError(f"only drafts along a path of the model have steps to measure, got {wrong[0]!r}")
    return named


def _prompt(model: PreTrainedModel, batch: int, context: int, room: int) -> Tensor:
    """Return random tokens, the same every time; what they say does not change what a pass costs."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = context if most is None else min(context, most - room - 1)
    if length < 1:
        raise DraftConfigError(f"the model's context of {most} has no room to measure in; ask for fewer repeats")
    embeddings = model.get_input_embeddings()
    tokens = torch.randint(embeddings.num_embeddings, (batch, length), generator=torch.Generator().manual_seed(_SEED))
    return tokens.to(model.device)


@dataclass
class Sample:
    """Times before one round, in seconds, and of the round.

    `units` are target passes over one token, several of them among the others; `draft` is by draft length, `verify` by
    the tokens verified; `probing` is all of that. `plain` is the round itself.
    """

    units: list[float] = field(default_factory=list)
    draft: Mapping[str, dict[int, float]] = field(default_factory=dict)
    verify: Mapping[str, dict[int, float]] = field(default_factory=dict)
    probing: float = 0.0
    plain: float = 0.0

    @property
    def unit(self) -> float:
        """Seconds of a target pass over one token, the unit of all else."""
        return statistics.median(self.units)

    def steps(self, name: str) -> list[float]:
        """Return the steps of a draft, in target passes over one token, by draft length."""
        return [seconds / length / self.unit for length, seconds in self.draft[name].items()]


class Repeating(Stateless):
    """Proposes the last token again and again, for nothing: rounds then cost what judging a draft does."""

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        return Draft.chain(rows.last_tokens.repeat(1, budget.depth))


class Probe(Stateless):
    """Times drafts and target passes over the state of a generation, which it leaves as it was.

    Widths are the tokens of target passes from tokens on, lengths those of drafts; `sample` has the times before the
    last round.
    """

    def __init__(
        self, drafters: Mapping[str, LayerPathDrafter], widths: Sequence[int], lengths: Sequence[int], timer: Timer
    ) -> None:
        self._drafters, self._widths, self._lengths, self._timer = drafters, widths, lengths, timer
        self.sample = Sample()
        self._turn = 0
        self._proposers: dict[str, Proposer] = {}

    def begin(self, rows: RowsView) -> Proposer:
        self._proposers = {name: drafter.begin(rows) for name, drafter in self._drafters.items()}
        return self

    def check(self, depth: int) -> None:
        for drafter in self._drafters.values():
            drafter.check(depth)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        for drafter in self._drafters.values():
            drafter.check_model(model, adapter)

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        assert isinstance(rows, Batch)
        names = [PLAIN, *self._drafters]
        self.sample = Sample(draft={name: {} for name in self._drafters}, verify={name: {} for name in names})
        jobs = [(PLAIN, width - 1) for width in self._widths]
        for name in self._drafters:
            jobs += [(PLAIN, 0), *((name, drafted) for drafted in self._lengths)]
        # In another order every time, so that what comes before a job is not always the same.
        self._turn += 1
        start = self._turn * 7 % len(jobs)
        began = self._timer.now()
        for job in [*jobs[start:], *jobs[:start]]:
            self._time(rows, *job)
        self.sample.probing = self._timer.now() - began
        return rows.no_draft()

    def _time(self, batch: Batch, name: str, length: int) -> None:
        # The block of the job before has other nodes.
        batch.cache.open(Tree.chain(length))
        drafts: list[Draft] = []
        if name == PLAIN:
            drafts.append(Draft.chain(batch.last_tokens.repeat(1, length)))
        else:
            proposer = self._proposers[name]
            took = self._timer.of(lambda: drafts.append(proposer.propose(batch, Budget.chain(length))))
            self.sample.draft[name][length] = took
        took = self._timer.of(lambda: verify(batch, drafts[0]))
        if length == 0:
            self.sample.units.append(took)
        else:
            self.sample.verify[name][length + 1] = took
