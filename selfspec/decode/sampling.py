"""How logits of a group of rows become the distribution that plain decoding would draw from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from transformers.generation import InfNanRemoveLogitsProcessor

from selfspec.decode.processors import Processing, SequentialProcessing, Warping, choice_of
from selfspec.decode.suppression import Suppression
from selfspec.runtime.chain import Choice


@dataclass(frozen=True)
class Sampling:
    """Says how tokens are chosen, in the same way from the target's logits and from a draft's.

    Temperature, top-k, top-p and other processors are in `selfspec.decode.processors`; what is done with this, for all
    rows of a batch, in `selfspec.decode.batch_sampling`.

    Attributes:
        processing: what logits go through first.
        greedy: whether the distribution is one-hot at the largest score.
        couples: whether tokens are chosen by the noise of their position, not by independent draws.
    """

    processing: Processing
    greedy: bool
    couples: bool = False

    def coupled(self) -> Sampling:
        """Return the same with tokens chosen by the noise of their position. Greedy decoding needs none."""
        return self if self.greedy else replace(self, couples=True)

    @property
    def decided(self) -> bool:
        """Whether there is one possible token everywhere, so that nothing is drawn."""
        return self.greedy or self.couples

    def choice(self, length: int) -> Choice | None:
        """Return how tokens are drawn where the last logits and a `Choice` say all of it; None: there is more to it.

        Args:
            length: of the prefix of the first place, in tokens; of the shortest row.
        """
        found = None if self.couples else choice_of(self.processing, length)
        if found is None or not self.greedy:
            return found
        # Whatever does not suppress tokens, as temperature, is left to single steps.
        alone = all(isinstance(each, Suppression) for each in self.processing.processors)
        return replace(found, temperature=0.0) if alone else None

    @property
    def mends(self) -> bool:
        """Whether processors put numbers in the place of logits that are not finite."""
        return any(type(each) is InfNanRemoveLogitsProcessor for each in self.processing.processors)

    @property
    def in_order(self) -> bool:
        """Whether some processor has memory, so that the target's places are scored by `next_scores`, in order."""
        return isinstance(self.processing, SequentialProcessing)

    @property
    def reads_prefixes(self) -> bool:
        """Whether some processor looks at more than the scores of a place."""
        return not isinstance(self.processing, Warping)

    def next_scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        """See `SequentialProcessing.next_scores`."""
        assert isinstance(self.processing, SequentialProcessing)
        return self.processing.next_scores(ids, logits)

    def forget_draft(self) -> None:
        """See `SequentialProcessing.forget_draft`."""
        assert isinstance(self.processing, SequentialProcessing)
        self.processing.forget_draft()
