"""The speed-up that the cost model predicts of an arm, beside the one that was measured.

Predicted are the tokens of the arm's rounds by what their parts cost when timed apart from the run:

    tokens / sum over rounds of (steps c + V(drafted + 1)),   against plain decoding, 1 token a round

That is the formula of Leviathan et al. (2023) for the rounds as they were: its numerator (1 - alpha^(gamma+1)) /
(1 - alpha) is the mean accepted length where alpha is the same at every place and gamma in every round, and here it is
what was measured. V is that of the pass the round made: one that resumes at the exit layer after draft steps, one from
tokens on after a look-up. The overhead o is left out, so that efficiency, measured by predicted, shows what it costs.

In the run itself the phases of the rounds are timed too; in plain rounds of the same run they are the draft's part of
a round, the verification's, and the rest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from selfspec.measure.estimate import Estimate
from selfspec.tools.bench.figures import decoding, ratio
from selfspec.tools.bench.record import Record


@dataclass(frozen=True)
class RoundCost:
    """The mean round of an arm in the run, in rounds of plain decoding in the same run.

    Attributes:
        draft: the draft's part.
        verify: the target pass.
        rest: acceptance, commit and all between the phases.
        steps: draft steps.
        drafted: draft tokens.
    """

    draft: float
    verify: float
    rest: float
    steps: float
    drafted: float

    @property
    def total(self) -> float:
        """What a round costs."""
        return self.draft + self.verify + self.rest

    def to_dict(self) -> dict[str, float]:
        """Ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class PredictedSpeedup:
    """Predicted beside measured.

    Attributes:
        predicted: speed-up against plain decoding by the passes' costs.
        measured: decoding speed against selfspec's plain decoding.
        efficiency: measured by predicted.
    """

    predicted: float
    measured: Estimate
    efficiency: float

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def round_cost(record: Record, plain: Record) -> RoundCost | None:
    """What a round cost in the run; None for arms that do not draft.

    Args:
        record: of an arm of selfspec's.
        plain: selfspec's plain decoding in the same cell.
    """
    if record.counts is None or plain.counts is None or record.arm.draft is None:
        return None
    step = _round_seconds(plain) / plain.counts.rounds
    rounds, seconds = record.counts.rounds, record.counts.seconds
    draft, verify = (seconds[phase] / rounds / step for phase in ("draft", "verify"))
    rest = _round_seconds(record) / rounds / step - draft - verify
    steps = sum(shape.steps * number for shape, number in record.rounds.items())
    drafted = sum(shape.drafted * number for shape, number in record.rounds.items())
    return RoundCost(draft, verify, rest, steps / rounds, drafted / rounds)


def prediction(record: Record, plain: Record) -> PredictedSpeedup | None:
    """The speed-up predicted and measured; None where the passes were not timed or the arm does not draft."""
    if record.costs is None or record.counts is None:
        return None
    costs = {shape: record.costs.of_round(shape.steps, shape.drafted) for shape in record.rounds}
    if None in costs.values():
        return None
    total = sum((costs[shape] or 0.0) * number for shape, number in record.rounds.items())
    # Rows advance side by side: a round commits so many tokens in each.
    predicted = sum(map(sum, record.tokens)) / record.cell.batch / total
    measured = ratio(record, plain, decoding)
    return PredictedSpeedup(predicted, measured, measured.value / predicted)


def _round_seconds(record: Record) -> float:
    """Time of all rounds: of whole calls, less their prefill."""
    assert record.counts is not None
    return sum(map(sum, record.seconds)) - record.counts.seconds.get("prefill", 0.0)
