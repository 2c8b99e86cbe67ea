"""What is kept of an arm in a cell: raw times, counts and texts, from which every figure follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from selfspec.decode.stats import Stats
from selfspec.measure.own_text import cycle_share
from selfspec.measure.timing import Call, DraftShape
from selfspec.tools.lab.agreement import TextAgreement
from selfspec.tools.lab.arms import ArmSpec
from selfspec.tools.lab.memory import PeakMemory
from selfspec.tools.lab.pass_costs import PassCosts
from selfspec.tools.lab.turns import ArmRun

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Setup:
    """What else must be the same for two measurements of a cell to be of one thing.

    The model, its `Origin`, what it computes in and where; CPU threads of torch; how often each arm was timed (0: texts
    were decoded once and not timed), on how many prompts, a digest of their tokens, and what was measured.
    """

    model: str
    base: str
    setting: str
    parameters: int
    dtype: str
    device: str
    threads: int
    repeats: int
    prompts: int
    prompts_digest: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, order=True)
class ShapeCount(DraftShape):
    """How many rounds there were of a shape."""

    rounds: int


@dataclass(frozen=True)
class Record:
    """An arm in a cell. Lists of lists have one list for each repeat, of one value for each call.

    Attributes:
        absence: why it did not run; None where it did.
        agreement: of greedy texts with those of `model.generate`.
        first_seconds: until its first tokens were there.
        tokens: new tokens of each call, of all rows.
        first_tokens: how many there were at `first_seconds`.
        passes: target passes of each call, prefill not counted.
        cycle_share: share of each call's tokens in passages that repeat themselves.
        texts: new tokens of each row of each call.
        said: these texts, written down; empty where there was no tokenizer.
        judged: of selfspec's arms, draft tokens that were judged in each call, by depth.
        accepted: as `judged`.
        counts: of selfspec's arms.
        rounds: of selfspec's arms, how many there were of each shape.
        memory: at the peak, in a separate process.
        costs: of the parts of its rounds, timed apart from the run.
        nats: negative log-likelihood of each text under the model at temperature 1, row by row; empty where texts were
            not scored.
    """

    arm: ArmSpec
    absence: str | None = None
    agreement: TextAgreement | None = None
    seconds: list[list[float]] = field(default_factory=list)
    first_seconds: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    first_tokens: list[list[int]] = field(default_factory=list)
    passes: list[list[int]] = field(default_factory=list)
    cycle_share: list[list[float]] = field(default_factory=list)
    texts: list[list[list[list[int]]]] = field(default_factory=list)
    judged: list[list[list[int]]] = field(default_factory=list)
    accepted: list[list[list[int]]] = field(default_factory=list)
    counts: Stats | None = None
    rounds: list[ShapeCount] = field(default_factory=list)
    memory: PeakMemory | None = None
    costs: PassCosts | None = None
    nats: list[list[list[float]]] = field(default_factory=list)
    said: list[list[list[str]]] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        """Whether the arm may not be scored, because its greedy texts differ though its rule is lossless."""
        return self.agreement is not None and self.agreement.refused and self.arm.lossless

    @property
    def scored(self) -> bool:
        """Whether there are figures to show."""
        return self.absence is None and not self.refused

    @classmethod
    def of(
        cls,
        measured: ArmRun,
        memory: PeakMemory | None = None,
        costs: PassCosts | None = None,
        nats: Sequence[list[list[float]]] = (),
        said: Sequence[list[list[str]]] = (),
    ) -> Record:
        """Keep what there is of an arm's calls."""

        def each(value: Callable[[Call], _Value]) -> list[list[_Value]]:
            return [[value(call) for call in repeat] for repeat in measured.calls]

        rounds = sum((call.rounds for repeat in measured.calls for call in repeat), Counter[DraftShape]())
        return cls(
            measured.arm.spec,
            measured.absence,
            measured.agreement,
            seconds=each(lambda call: call.seconds),
            first_seconds=each(lambda call: call.first_seconds),
            tokens=each(lambda call: call.tokens),
            first_tokens=each(lambda call: call.first_tokens),
            passes=each(lambda call: call.passes),
            cycle_share=each(lambda call: sum(cycle_share(row) * len(row) for row in call.rows) / call.tokens),
            texts=each(lambda call: call.rows),
            judged=each(lambda call: call.stats.judged_per_depth if call.stats else []),
            accepted=each(lambda call: call.stats.accepted_per_depth if call.stats else []),
            counts=measured.counts,
            rounds=[ShapeCount(shape.drafted, shape.steps, number) for shape, number in sorted(rounds.items())],
            memory=memory,
            costs=costs,
            nats=list(nats),
            said=list(said),
        )
