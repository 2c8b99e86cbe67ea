"""A drafter that proposes nothing: before each round it times what others would draft and the target would verify."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.tree import Tree
from selfspec.decode.batch import Batch
from selfspec.decode.steps import verify
from selfspec.draft import Budget, Draft, Proposer, RowsView, Stateless
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import PLAIN
from selfspec.runtime.timer import Timer


@dataclass
class Sample:
    """What was timed before one round, in seconds, and the round.

    Attributes:
        units: target passes over one token, several of them among the others.
        draft: of each draft by draft length.
        verify: target passes of each draft by the tokens they verify; `none`: from tokens on.
        probing: all of that.
        plain: the round itself, plain decoding; the code that times it fills it in.
    """

    units: list[float] = field(default_factory=list)
    draft: Mapping[str, dict[int, float]] = field(default_factory=dict)
    verify: Mapping[str, dict[int, float]] = field(default_factory=dict)
    probing: float = 0.0
    plain: float = 0.0

    @property
    def unit(self) -> float:
        """A target pass over one token: what all else is compared with, being timed several times."""
        return statistics.median(self.units)

    def steps(self, name: str) -> list[float]:
        """Steps of a draft, in target passes over one token; one value for each draft length."""
        return [seconds / length / self.unit for length, seconds in self.draft[name].items()]


class Repeating(Stateless):
    """Proposes the last token again and again, for nothing: rounds then cost what judging a draft does."""

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        return Draft.chain(rows.last_tokens.repeat(1, budget.depth))


class Probe(Stateless):
    """Times drafts and target passes over the state of a generation and leaves it as it was.

    Widths are the tokens of target passes from tokens on, lengths those of drafts.

    Attributes:
        sample: what was timed before the last round.
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
