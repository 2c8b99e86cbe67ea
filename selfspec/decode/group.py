"""Rows of one call with their own state, which processors and criteria see side by side, padded to one length."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor
from transformers.generation import InfNanRemoveLogitsProcessor

from selfspec.decode.noise import Noise
from selfspec.decode.output import ScoreRecords
from selfspec.decode.processors import Processing, SequentialProcessing, Suppression, Warping, choice_of
from selfspec.decode.sequences import Sequences
from selfspec.decode.stopping import Stopping
from selfspec.runtime.request import Choice


@dataclass(frozen=True)
class Sampling:
    """Defines how tokens are chosen, in the same way from the target's and the draft's logits.

    Attributes:
        processing: turns logits into scores by temperature, top-k, top-p and other processors.
        greedy: True if the distribution is one-hot at the largest score.
        couples: True if the noise of their position chooses tokens, not independent draws.
    """

    processing: Processing
    greedy: bool
    couples: bool = False

    def coupled(self) -> Sampling:
        """Return this sampling with tokens chosen by the noise of their position; greedy sampling is unchanged."""
        return self if self.greedy else replace(self, couples=True)

    @property
    def decided(self) -> bool:
        """True if each place has one possible token, so that nothing is drawn."""
        return self.greedy or self.couples

    def choice(self, length: int) -> Choice | None:
        """Return how to draw if logits alone suffice from `length` tokens on; None: they do not."""
        found = None if self.couples else choice_of(self.processing, length)
        if found is None or not self.greedy:
            return found
        # Leave processors that do not suppress tokens, such as temperature, to single steps.
        alone = all(isinstance(each, Suppression) for each in self.processing.processors)
        return replace(found, temperature=0.0) if alone else None

    @property
    def mends(self) -> bool:
        """True if processors replace logits that are not finite by numbers."""
        return any(type(each) is InfNanRemoveLogitsProcessor for each in self.processing.processors)

    @property
    def in_order(self) -> bool:
        """True if some processor has memory, so that `next_scores` scores the target's places in order."""
        return isinstance(self.processing, SequentialProcessing)

    @property
    def reads_prefixes(self) -> bool:
        """True if some processor reads more than the scores of a place."""
        return not isinstance(self.processing, Warping)

    def next_scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        assert isinstance(self.processing, SequentialProcessing)
        return self.processing.next_scores(ids, logits)

    def forget_draft(self) -> None:
        assert isinstance(self.processing, SequentialProcessing)
        self.processing.forget_draft()


@dataclass(eq=False)
class Group:
    """Holds rows of one call, which outlive the cache they run in: those of `generate`, or an engine's single row.

    Attributes:
        stopping: where rows end, or must be read again with other rotary tables.
        whole: where rows end that may be read again; None: as `stopping`.
        noise: noise of the rows; while they run, the batch's noise is ahead of it.
        kind: equal for groups whose processors read scores alone and do the same.
        isolated: True if an error of a processor or criterion ends these rows alone instead of being raised.
        error: that error in this round.
        ahead: True if processors with memory saw tokens that are not committed yet.
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
        return self.sequences.committed

    @property
    def unfinished(self) -> set[int]:
        return self.sequences.unfinished

    @property
    def running(self) -> list[int]:
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
        """Return the most tokens that a row may still commit."""
        return self.stopping.max_new_tokens - len(self.committed[row])

    def ends(self, runs: Sequence[Sequence[int]], scores: Tensor, logits: Tensor) -> list[int | None]:
        """Record scores and logits, `[running, places, vocab]`; return how many new tokens each ending row keeps."""
        starts, counts = [len(tokens) for tokens in self.committed], [len(run) for run in runs]
        try:
            kept = self.records.keep(scores, logits, self.running, starts, counts)
            return self.stopping.judged(self.sequences, runs, kept)
        except Exception as error:
            if not self.isolated:
                raise
            self.error = error
            return [0] * len(runs)
