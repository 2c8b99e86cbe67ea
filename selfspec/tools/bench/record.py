"""What is kept of an arm in a cell, one JSON object each: raw times and counts, from which every figure follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from selfspec.decode.stats import Stats
from selfspec.measure.cycles import cycle_share
from selfspec.measure.timing import Call, DraftShape
from selfspec.tools.bench.agreement import TextAgreement
from selfspec.tools.bench.arm import ArmSpec
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.costs import PassCosts
from selfspec.tools.bench.measure import ArmRun
from selfspec.tools.bench.memory import Memory


@dataclass(frozen=True)
class Setup:
    """What else must be the same for two measurements of a cell to be of one thing.

    Attributes:
        model: its name.
        parameters: of the model.
        dtype: what it computes in.
        device: where.
        threads: CPU threads of torch.
        repeats: how often each arm was timed.
        prompts: how many.
        prompts_digest: of their tokens.
    """

    model: str
    parameters: int
    dtype: str
    device: str
    threads: int
    repeats: int
    prompts: int
    prompts_digest: str


@dataclass(frozen=True)
class Record:
    """An arm in a cell. Lists of lists have one list for each repeat, of one value for each call.

    Attributes:
        run: which run of the benchmark measured the cell.
        cell: the conditions.
        settings: the rest of them.
        arm: which.
        absence: why it did not run; None where it did.
        agreement: of greedy texts with those of `model.generate`.
        seconds: of each call.
        first_seconds: until its first tokens stood.
        tokens: new tokens of each call, of all rows.
        first_tokens: how many of them stood at `first_seconds`.
        passes: target passes of each call, prefill not counted.
        cycle_share: share of each call's tokens in passages that repeat themselves.
        counts: of selfspec's arms.
        rounds: of selfspec's arms, how many rounds there were of each shape.
        memory: at the peak, in a process of its own.
        costs: of the parts of its rounds, timed apart from the run.
        environment: versions and machine.
    """

    run: str
    cell: Cell
    settings: Setup
    arm: ArmSpec
    environment: Mapping[str, str | int | None]
    absence: str | None = None
    agreement: TextAgreement | None = None
    seconds: list[list[float]] = field(default_factory=list)
    first_seconds: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    first_tokens: list[list[int]] = field(default_factory=list)
    passes: list[list[int]] = field(default_factory=list)
    cycle_share: list[list[float]] = field(default_factory=list)
    counts: Stats | None = None
    rounds: dict[DraftShape, int] = field(default_factory=dict)
    memory: Memory | None = None
    costs: PassCosts | None = None

    @property
    def refused(self) -> bool:
        """Whether the arm may not be scored, because its greedy texts differ."""
        return self.agreement is not None and self.agreement.refused

    @property
    def scored(self) -> bool:
        """Whether there are figures to show."""
        return self.absence is None and not self.refused

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            # A key that is no string cannot become one.
            **asdict(replace(self, rounds={})),
            "agreement": None if self.agreement is None else self.agreement.to_dict(),
            "rounds": [{**asdict(shape), "rounds": number} for shape, number in sorted(self.rounds.items())],
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Record:
        """Read back from JSON."""
        agreement, counts, memory, costs = (found[name] for name in ("agreement", "counts", "memory", "costs"))
        return cls(
            **{
                **found,
                "cell": Cell.from_dict(found["cell"]),
                "settings": Setup(**found["settings"]),
                "arm": ArmSpec.from_dict(found["arm"]),
                "agreement": None if agreement is None else TextAgreement.from_dict(agreement),
                "counts": None if counts is None else Stats(**counts),
                "memory": None if memory is None else Memory(**memory),
                "costs": None if costs is None else PassCosts.from_dict(costs),
                "rounds": {DraftShape(each["drafted"], each["steps"]): each["rounds"] for each in found["rounds"]},
            }
        )


def record_of(
    measured: ArmRun,
    run: str,
    cell: Cell,
    settings: Setup,
    environment: Mapping[str, str | int | None],
    memory: Memory | None,
    costs: PassCosts | None,
) -> Record:
    """What is kept of an arm's calls."""
    calls = [call for repeat in measured.calls for call in repeat]
    stats = [call.stats for call in calls if call.stats is not None]
    rounds: Counter[DraftShape] = Counter()
    for call in calls:
        rounds.update(call.rounds)
    return Record(
        run=run,
        cell=cell,
        settings=settings,
        arm=measured.arm.spec,
        environment=environment,
        absence=measured.absence,
        agreement=measured.agreement,
        seconds=[[call.seconds for call in repeat] for repeat in measured.calls],
        first_seconds=[[call.first_seconds for call in repeat] for repeat in measured.calls],
        tokens=[[call.tokens for call in repeat] for repeat in measured.calls],
        first_tokens=[[call.first_tokens for call in repeat] for repeat in measured.calls],
        passes=[[call.passes for call in repeat] for repeat in measured.calls],
        cycle_share=[[_cycle_share(call) for call in repeat] for repeat in measured.calls],
        counts=Stats.together(stats) if stats else None,
        # In the order of the file, so that sums read back are the same to the last bit.
        rounds=dict(sorted(rounds.items())),
        memory=memory,
        costs=costs,
    )


def _cycle_share(call: Call) -> float:
    return sum(cycle_share(row) * len(row) for row in call.rows) / call.tokens
