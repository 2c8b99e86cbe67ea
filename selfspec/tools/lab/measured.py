"""A cell with all its arms, as a run of the lab and back; and the figures of an arm, made of raw times and counts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from selfspec.errors import BenchError
from selfspec.measure.estimate import Estimate
from selfspec.measure.spare_cores import SpareCores
from selfspec.tools.lab.arms import ArmKind, ArmSpec, Cell
from selfspec.tools.lab.record import Record, Setup, TextQuality, differing, qualities
from selfspec.tools.lab.runs import Asked, Run, told_apart
from selfspec.tools.lab.study import first_error

KIND = "cell"


@dataclass(frozen=True)
class MeasuredCell:
    """All arms of a cell, in the order of the report, measured in turns; `asked` are the prompts as text."""

    cell: Cell
    settings: Setup
    arms: tuple[Record, ...]
    environment: Mapping[str, str | bool | int | None]
    load: SpareCores
    asked: list[list[str]] = field(default_factory=list)

    @classmethod
    def of(cls, run: Run) -> MeasuredCell:
        """Return the cell of a run; a run of another version is a BenchError."""
        load = asdict(run.load or SpareCores(0, None))
        content = {**run.asked.under, **run.found, "environment": run.environment, "load": load}
        try:
            return _MEASURED.validate_json(json.dumps(content), strict=True)
        except ValidationError as wrong:
            raise BenchError(
                f"a cell of these runs is no result of this version of selfspec bench ({first_error(wrong)}); give "
                "another folder"
            ) from None

    @classmethod
    def question(cls, cell: Cell, settings: Setup) -> Asked:
        """Return what is asked about a cell: the key of its run."""
        return Asked(KIND, {"cell": asdict(cell), "settings": asdict(settings)}, {"title": cell.title})

    @property
    def run(self) -> Run:
        """Return the run to keep."""
        arms = [asdict(record) for record in self.arms]
        found = {"arms": arms, "asked": self.asked}
        return Run(self.question(self.cell, self.settings), found, environment=self.environment, load=self.load)

    @property
    def timed(self) -> bool:
        """True if calls were timed in turns."""
        return self.settings.repeats > 0

    def scored(self, kind: ArmKind) -> Record | None:
        """Return the first arm of a kind, if it is scored."""
        return next((record for record in self.arms if record.arm.kind == kind and record.scored), None)

    @cached_property
    def figures(self) -> dict[ArmSpec, Figures]:
        """Figures of the arms that are scored."""
        scored = [record for record in self.arms if record.scored]
        if not self.timed:
            return {record.arm: untimed_figures(record) for record in scored}
        others = self.scored("generate"), self.scored("plain")
        return {record.arm: figures(record, *others) for record in scored}

    @cached_property
    def qualities(self) -> dict[ArmSpec, TextQuality]:
        """Qualities of the arms whose texts were scored."""
        return qualities([record for record in self.arms if record.absence is None])

    @cached_property
    def doubts(self) -> list[str]:
        """Sentences on figures that cannot be, or were made beside other work."""
        plain = self.scored("plain")
        beside = None if plain is None else self.figures[plain.arm]
        found = [
            said
            for record in self.arms
            if record.arm in self.figures
            for said in doubts(record, self.figures[record.arm], beside)
        ]
        alike = [
            record.arm.name
            for record in self.arms
            if record.arm.kind == "draft" and record.arm in self.figures and self._has_no_width(record.arm)
        ]
        if alike:
            found.append(
                f"all prompts had as many tokens a pass ({'; '.join(alike)}), so there the interval has no width; give "
                "more prompts"
            )
        if self.timed and self.settings.device == "cpu" and (busy := self.load.doubt(self.settings.threads)):
            found.append(busy)
        return found

    def _has_no_width(self, arm: ArmSpec) -> bool:
        found = self.figures[arm].mean_accepted_length
        return found.low == found.high

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, ready for JSON; texts and times of each call are in the file of runs."""
        far, arms = differing(self.qualities), []
        for record in self.arms:
            found, quality = self.figures.get(record.arm), self.qualities.get(record.arm)
            agreement = record.agreement and {**asdict(record.agreement), "refused": record.refused}
            arms.append(
                {
                    "name": record.arm.name,
                    "arm": asdict(record.arm),
                    "absence": record.absence,
                    "agreement": agreement,
                    "memory": record.memory and asdict(record.memory),
                    "quality": quality and {**asdict(quality), "differs": record.arm in far},
                    **({} if found is None else asdict(found)),
                }
            )
        return {
            "cell": asdict(self.cell),
            "settings": asdict(self.settings),
            "environment": dict(self.environment),
            "load": asdict(self.load),
            "doubts": self.doubts,
            "arms": arms,
        }


def titles(measured: Sequence[MeasuredCell]) -> list[str]:
    """Return titles of cells that say how they differ, in a few words; of a single one its workload and decoding."""
    # Workloads that one option makes begin alike.
    workloads = [each.cell.workload for each in measured]
    begun = {name.partition("/")[0] for name in workloads}
    alike = f"{begun.pop()}/" if len(begun) == 1 and all("/" in name for name in workloads) else ""
    models = told_apart((each.settings.model, each.settings.base) for each in measured)
    around = dict.fromkeys(name for each in measured for name in each.environment)
    parts = [
        (
            each.cell.workload.removeprefix(alike),
            f"T {each.cell.temperature:g}" if each.cell.sampled else "greedy",
            f"batch {each.cell.batch}",
            "whole prompts" if each.cell.context is None else f"{each.cell.context} of prompt",
            f"{each.cell.max_new_tokens} new",
            "chat" if each.cell.chat else "text",
            models[each.settings.model, each.settings.base],
            each.settings.dtype,
            f"{each.settings.repeats} repeats",
            f"prompts {each.settings.prompts_digest[:6]}",
            *(f"{name} {each.environment.get(name)}" for name in around),
        )
        for each in measured
    ]
    differing = [place for place, values in enumerate(zip(*parts, strict=True)) if len({*values}) > 1] or [0, 1]
    shown = [", ".join(part[place] for place in differing) for part in parts]
    if len({*shown}) == len(shown):
        return shown
    # What tells them apart has no words, as a configuration.
    return [f"{title}, {each.settings.setting[:6]}" for title, each in zip(shown, measured, strict=True)]


_MEASURED = TypeAdapter(MeasuredCell)


CYCLING = 0.1
"""Texts with a larger share of their tokens inside repeating cycles are left out of the figures without cycles."""

# Tokens per second over some of the calls, one figure for each repeat.
_Speeds = NDArray[np.float64]


@dataclass(frozen=True)
class RoundCost:
    """Holds the mean times of an arm's rounds, in plain rounds of the same run, and their draft steps and draft tokens.

    `rest` is the time of acceptance, of commit, and of all that is neither draft nor target pass.
    """

    draft: float
    verify: float
    rest: float
    steps: float
    drafted: float


@dataclass(frozen=True)
class PredictedSpeedup:
    """Holds an arm's speed-up over plain decoding: predicted by the cost model, measured, and their ratio, efficiency.

        predicted = tokens / sum over rounds of (steps c + V(drafted + 1))

    This is the formula of Leviathan et al. (2023), with the measured tokens of each round in place of the mean accepted
    length at constant alpha and gamma, (1 - alpha^(gamma+1)) / (1 - alpha). It leaves out the overhead o.
    """

    predicted: Estimate
    measured: Estimate
    efficiency: float


@dataclass(frozen=True)
class Figures:
    """Figures of an arm that is scored. Speeds are tokens per second of all rows together; None if not timed.

    Ratios are taken repeat by repeat, because what slows the machine slows both arms of a repeat.

    Attributes:
        first_token_seconds: until the first tokens of a call are there; of each repeat the mean over calls.
        decoding_against: decoding speed against that of `model_generate` and of selfspec `plain`.
        decoding_without_cycles: against `model.generate` in the calls whose texts hardly repeat themselves.
        mean_accepted_length: tokens committed per target pass of a row, with an interval over calls.
        round_in_plain_steps: cost of a round in the run; None for arms that do not draft.
        prediction: None where the passes were not timed or the arm does not draft.
    """

    mean_accepted_length: Estimate
    acceptance_rate: Estimate | None
    acceptance_by_depth: list[float | None] | None
    cycle_share: float
    decoding_tokens_per_second: Estimate | None = None
    whole_call_tokens_per_second: Estimate | None = None
    first_token_seconds: Estimate | None = None
    decoding_against: dict[str, Estimate] = field(default_factory=dict)
    decoding_without_cycles: Estimate | None = None
    whole_call_against: Estimate | None = None
    round_in_plain_steps: RoundCost | None = None
    prediction: PredictedSpeedup | None = None


def figures(record: Record, reference: Record | None, plain: Record | None) -> Figures:
    """Return the figures of an arm beside `model.generate` and selfspec's plain decoding in the same cell."""
    own = _decoding(record)
    others = {"model_generate": reference, "plain": plain}
    against = {name: _median(own / _decoding(other)) for name, other in others.items() if other is not None}
    calm = [] if reference is None else calls_without_cycles(reference)
    return replace(
        untimed_figures(record),
        decoding_tokens_per_second=_median(own),
        whole_call_tokens_per_second=_median(_whole_call(record)),
        first_token_seconds=_median(np.mean(record.first_seconds, 1)),
        decoding_against=against,
        decoding_without_cycles=_median(_decoding(record, calm) / _decoding(reference, calm))
        if reference and calm
        else None,
        whole_call_against=_median(_whole_call(record) / _whole_call(reference)) if reference else None,
        round_in_plain_steps=_round_cost(record, plain) if plain else None,
        prediction=_prediction(record, against["plain"]) if plain else None,
    )


def untimed_figures(record: Record) -> Figures:
    """Return the figures of an arm whose texts were decoded once, untimed: counts alone."""
    judged, accepted = (
        [float(sum(sum(depths) for depths in call)) for call in zip(*counts, strict=True)]
        for counts in (record.judged, record.accepted)
    )
    by_depth: list[float | None] | None = None
    if record.counts is not None:
        pairs = zip(record.counts.accepted_per_depth, record.counts.judged_per_depth, strict=True)
        by_depth = [stood / seen if seen else None for stood, seen in pairs]
    return Figures(
        mean_accepted_length=_tokens_a_pass(record),
        acceptance_rate=_over_calls(accepted, judged) if sum(judged) else None,
        acceptance_by_depth=by_depth,
        cycle_share=float(np.mean(record.cycle_share)),
    )


def doubts(record: Record, found: Figures, plain: Figures | None) -> Iterator[str]:
    """Say which figures of an arm cannot be, or say less than they seem to."""
    if found.decoding_tokens_per_second is None:
        return
    if len(record.seconds) == 1:
        yield f"{record.arm.name}: timed once, so its speeds have no interval; give more --repeats"
    against = found.decoding_against.get("plain")
    if plain is None or against is None or record.arm.kind != "draft":
        return
    doubt = against.doubt(found.mean_accepted_length.value / plain.mean_accepted_length.value)
    if doubt is not None:
        yield f"{record.arm.name}: {doubt}"
    elif found.prediction is not None and found.prediction.measured.doubt(found.prediction.predicted.high):
        yield (
            f"{record.arm.name}: an efficiency of {found.prediction.efficiency:.2f} cannot be; its parts were timed "
            "while the machine was slower than in the run"
        )


def calls_without_cycles(reference: Record) -> list[int]:
    """Return the calls whose texts by the reference arm have at most `CYCLING` of their tokens in repeating cycles."""
    calls: list[int] = np.flatnonzero(np.mean(reference.cycle_share, 0) <= CYCLING).tolist()
    return calls


def _tokens_a_pass(record: Record) -> Estimate:
    batch = max(len(rows) for repeat in record.texts for rows in repeat) if record.texts else 1
    passes = np.sum(record.passes, 0) * float(batch)
    if record.counts is not None and batch > 1:
        # Rows that have ended make no rounds.
        passes = passes * (record.counts.row_rounds / passes.sum())
    return _over_calls(np.sum(record.tokens, 0).tolist(), passes.tolist())


def _over_calls(parts: Sequence[float], wholes: Sequence[float]) -> Estimate:
    """Return a ratio with an interval over calls, whose prompts differ."""
    pairs = [pair for pair in zip(parts, wholes, strict=True) if pair[1] > 0]
    return Estimate.of_ratio([part for part, _ in pairs], [whole for _, whole in pairs])


def _whole_call(record: Record) -> _Speeds:
    speeds: _Speeds = np.sum(record.tokens, 1) / np.sum(record.seconds, 1)
    return speeds


def _decoding(record: Record, calls: Sequence[int] | slice = slice(None)) -> _Speeds:
    tokens = np.array(record.tokens) - record.first_tokens
    seconds = np.array(record.seconds) - record.first_seconds
    # Where every text ends with its first tokens nothing is decoded after them.
    speeds: _Speeds = tokens[:, calls].sum(1) / np.maximum(seconds[:, calls].sum(1), 1e-9)
    return np.maximum(speeds, 1e-9)


def _median(of_repeats: _Speeds) -> Estimate:
    return Estimate.of_median(of_repeats.tolist())


def _round_cost(record: Record, plain: Record) -> RoundCost | None:
    if record.counts is None or plain.counts is None or record.arm.draft is None:
        return None
    step = _round_seconds(plain) / plain.counts.rounds
    rounds, seconds = record.counts.rounds, record.counts.seconds
    draft, verify = (seconds[phase] / rounds / step for phase in ("draft", "verify"))
    rest = _round_seconds(record) / rounds / step - draft - verify
    steps = sum(shape.steps * shape.rounds for shape in record.rounds)
    drafted = sum(shape.drafted * shape.rounds for shape in record.rounds)
    return RoundCost(draft, verify, rest, steps / rounds, drafted / rounds)


def _round_seconds(record: Record) -> float:
    """Time of all rounds: of whole calls, less their prefill."""
    assert record.counts is not None
    return float(np.sum(record.seconds)) - record.counts.seconds.get("prefill", 0.0)


def _prediction(record: Record, measured: Estimate) -> PredictedSpeedup | None:
    if record.costs is None or record.counts is None:
        return None
    total = [0.0, 0.0, 0.0]
    for shape in record.rounds:
        # V is that of the pass the round made: resumed after draft steps, from tokens on after a look-up.
        cost = record.costs.of_round(shape.steps, shape.drafted)
        if cost is None:
            return None
        total = [
            sum_ + each * shape.rounds for sum_, each in zip(total, (cost.value, cost.low, cost.high), strict=True)
        ]
    # Tokens that a running row commits in a round.
    counts = record.counts
    tokens = counts.new_tokens / counts.row_rounds * counts.rounds
    predicted = Estimate(tokens / total[0], tokens / total[2], tokens / max(total[1], 1e-9), 0.9)
    return PredictedSpeedup(predicted, measured, measured.value / predicted.value)
