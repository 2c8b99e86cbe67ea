"""Turn logits of a group of rows into the distribution that plain decoding would draw from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from transformers.generation import InfNanRemoveLogitsProcessor

from selfspec.decode.processors import Processing, SequentialProcessing, Warping, choice_of
from selfspec.decode.suppression import Suppression
from selfspec.runtime.chain import Choice


@dataclass(frozen=True)
class Sampling:
    """Defines how tokens are chosen, in the same way from the target's and the draft's logits.

    Temperature, top-k, top-p and other processors are in `selfspec.decode.processors`; `selfspec.decode.batch_sampling`
    applies this to all rows of a batch.

    Attributes:
        processing: turns logits into scores.
        greedy: whether the distribution is one-hot at the largest score.
        couples: whether tokens are chosen by the noise of their position, not by independent draws.
    """

    processing: Processing
    greedy: bool
    couples: bool = False

    def coupled(self) -> Sampling:
        """Return this sampling with tokens chosen by the noise of their position; greedy sampling stays as it is."""
        return self if self.greedy else replace(self, couples=True)

    @property
    def decided(self) -> bool:
        """True if each place has one possible token, so that nothing is drawn."""
        return self.greedy or self.couples

    def choice(self, length: int) -> Choice | None:
        """Return how tokens are drawn if the last logits and a `Choice` suffice; None: they do not.

        Args:
            length: of the shortest row's prefix of the first place, in tokens.
        """
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
        """See `SequentialProcessing.next_scores`."""
        assert isinstance(self.processing, SequentialProcessing)
        return self.processing.next_scores(ids, logits)

    def forget_draft(self) -> None:
        """See `SequentialProcessing.forget_draft`."""
        assert isinstance(self.processing, SequentialProcessing)
        self.processing.forget_draft()
