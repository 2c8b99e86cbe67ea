"""Rows of one call with their own state: the rows of `generate`, or the one row of a request to an engine.

Processors and criteria of `transformers` see such rows side by side, padded to one length. A batch runs one group or
more; its work on a group does not depend on the other groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from selfspec.decode.noise import Noise
from selfspec.decode.sampling import Sampling
from selfspec.decode.score_record import ScoreRecords
from selfspec.decode.sequences import Sequences
from selfspec.decode.stopping import Stopping


@dataclass(eq=False)
class Group:
    """Rows of one call. They outlive the cache they run in, so that they can be read again.

    Attributes:
        sequences: prompts and committed tokens.
        sampling: how their logits become probabilities; processors may remember the texts.
        stopping: where rows end, or must be read again with other rotary tables.
        whole: where rows end that may be read again; None: as `stopping`.
        noise: of the rows; while they run, the batch's noise is ahead of it.
        records: scores and logits of committed tokens that the caller asked for.
        kind: equal for groups whose processors read scores alone and do the same.
        isolated: whether an error of a processor or criterion ends these rows alone instead of being raised.
        error: error of a processor or criterion of isolated rows in this round; None: there is none.
        ahead: whether processors with memory saw tokens that are not committed yet.
        failed: numbers of the rows that ended because the target's logits were not finite.
    """

    sequences: Sequences
    sampling: Sampling
    stopping: Stopping
    noise: Noise
    records: ScoreRecords = field(default_factory=ScoreRecords)
    kind: Hashable = None
    isolated: bool = False
    whole: Stopping | None = None
    error: Exception | None = None
    ahead: bool = False
    failed: list[int] = field(default_factory=list)

    @property
    def committed(self) -> list[list[int]]:
        """New tokens of each row, final."""
        return self.sequences.committed

    @property
    def unfinished(self) -> set[int]:
        """Numbers of the rows that have not ended."""
        return self.sequences.unfinished

    @property
    def running(self) -> list[int]:
        """Numbers of the rows that passes run."""
        return self.sequences.running

    @property
    def length(self) -> int:
        """Number of tokens of the longest row, prompt and padding included."""
        return max(map(self.sequences.length, range(len(self.committed))))

    @property
    def longest(self) -> int:
        """Most tokens that a row may reach, prompt included."""
        return self.sequences.width + self.stopping.max_new_tokens

    @property
    def needs_lockstep(self) -> bool:
        """True if processors or stopping criteria need all unfinished rows at one length in every round."""
        return len(self.unfinished) > 1 and (self.sampling.in_order or self.stopping.needs_lockstep)

    def remaining(self, row: int) -> int:
        """Return the most tokens that a row may still grow by."""
        return self.stopping.max_new_tokens - len(self.committed[row])

    def ends(self, runs: Sequence[Sequence[int]], scores: Tensor, logits: Tensor) -> list[int | None]:
        """Record scores and logits that the caller asked for; return how many tokens each row keeps if it ends there.

        Args:
            runs: tokens of each row, about to be committed.
            scores: as processors left them, `[running, places, vocab]`.
            logits: the target's own, of the same shape.
        """
        starts, counts = [len(tokens) for tokens in self.committed], [len(run) for run in runs]
        try:
            kept = self.records.keep(scores, logits, self.running, starts, counts)
            return self.stopping.judged(self.sequences, runs, kept)
        except Exception as error:
            if not self.isolated:
                raise
            self.error = error
            return [0] * len(runs)
