"""A batch whose rows come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from selfspec.decode.batch import Batch
from selfspec.decode.rows.logprobs import LogprobRecords
from selfspec.decode.rows.row import Row
from selfspec.decode.rows.sampling import JoinedSampling
from selfspec.decode.rows.sequences import JoinedSequences
from selfspec.decode.rows.stopping import JoinedStopping
from selfspec.decode.score_record import ScoreRecords
from selfspec.draft import Proposer


@dataclass
class RowsBatch(Batch):
    """The rows that run now, numbered from 0. A row that ends stays until `keep` leaves it out.

    Attributes:
        rows: each with all that is its own, in the order in which tensors hold them.
        proposers: what may draft for them, by the `id` of its drafter.
    """

    rows: list[Row] = field(default_factory=list)
    proposers: dict[int, Proposer] = field(default_factory=dict)

    def remaining(self, row: int) -> int:
        return self.rows[row].remaining

    @property
    def pacing(self) -> set[int]:
        # Each row has a caller of its own who waits.
        return self.unfinished

    def draft_scores(self, logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        assert isinstance(self.sampling, JoinedSampling)
        return self.sampling.draft_scores(logits, drafted)

    def drop_finished(self) -> None:
        """Nothing: whoever runs the batch says which rows leave."""

    def join(self, other: RowsBatch) -> None:
        """Add the rows of another batch of the same model and drafter, which is of no use afterwards.

        Raises:
            ValueError: the cache has no storage for them.
        """
        self.cache.join(other.cache)
        self.noise = self.noise.joined(other.noise)
        self.last_tokens = torch.cat([self.last_tokens, other.last_tokens])
        self.rows = [*self.rows, *other.rows]
        for number, proposer in self.proposers.items():
            proposer.join(other.proposers[number])
        self._renew()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only some rows, at least one, in the order given; none of them before its own number."""
        self.cache.keep(rows)
        self.noise = self.noise.narrowed(rows)
        self.last_tokens = self.last_tokens[list(rows)]
        self.rows = [self.rows[row] for row in rows]
        self.nonfinite_rows = [new for new, row in enumerate(rows) if row in self.nonfinite_rows]
        for proposer in self.proposers.values():
            proposer.select(rows)
        self._renew()

    def _renew(self) -> None:
        self.sequences = JoinedSequences([row.sequences for row in self.rows])
        self.sampling = JoinedSampling(self.rows)
        self.stopping = JoinedStopping(self.rows)
        self.records = records_of(self.rows)
        self.failed = []

    def part(self, rows: Sequence[int]) -> RowsBatch:
        """Some of the rows, to judge a round of them: no pass can be run with it."""
        kept = [self.rows[row] for row in rows]
        return replace(
            self,
            cache=self.cache.cursors_of(rows),
            sampling=JoinedSampling(kept),
            noise=self.noise.narrowed(rows),
            last_tokens=self.last_tokens[list(rows)],
            sequences=JoinedSequences([row.sequences for row in kept]),
            stopping=JoinedStopping(kept),
            records=records_of(kept),
            rows=kept,
        )

    def alone(self, index: int) -> Batch:
        """One of the rows as a batch of `generate`, to judge a round of it."""
        row = self.rows[index]
        return Batch(
            runner=self.runner,
            cache=self.cache.cursors_of([index]),
            sampling=row.sampling,
            noise=self.noise.narrowed([index]),
            controller=self.controller,
            last_tokens=self.last_tokens[index : index + 1],
            sequences=row.sequences,
            stopping=row.stopping,
            records=records_of([row]),
            needs_lockstep=True,
        )


def records_of(rows: Sequence[Row]) -> ScoreRecords:
    """What keeps log-probabilities of some rows."""
    return LogprobRecords([row.record for row in rows])
