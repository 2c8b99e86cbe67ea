"""Processed logits to probabilities, in one way for target p and draft q; and draws from them.

Temperature, top-k, top-p and other processors are in `selfspec.decode.processors`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.generation import InfNanRemoveLogitsProcessor

from selfspec.decode.noise import Noise, Purpose
from selfspec.decode.processors import Processing, SequentialProcessing, Warping
from selfspec.decode.sequences import Prefixes
from selfspec.draft.draft import Draft


@dataclass(frozen=True)
class NextTokens:
    """The tokens of a round without a draft.

    Attributes:
        tokens: `[rows, 1]`.
        finite: whether there was a distribution to choose from, `[rows, 1]`; if not, the token is arbitrary. None:
            there was in all rows.
    """

    tokens: Tensor
    finite: Tensor | None


class Sampling:
    """Turns logits into the distribution that plain decoding would draw from.

    Args:
        processing: what logits go through first, the same for target and draft.
        greedy: whether the distribution is one-hot at the largest score.
        coupled: whether tokens are chosen by the noise of their position, not by independent draws.

    Attributes:
        greedy: as given.
        mends: whether processors put numbers in the place of logits that are not finite.
    """

    def __init__(self, processing: Processing, greedy: bool, coupled: bool = False) -> None:
        self._processing = processing
        self._coupled = coupled
        self.greedy = greedy
        self.mends = any(type(each) is InfNanRemoveLogitsProcessor for each in processing.processors)

    def coupled(self) -> Sampling:
        """The same distributions, with tokens chosen by the noise of their position. Greedy decoding needs none."""
        return self if self.greedy else Sampling(self._processing, greedy=False, coupled=True)

    @property
    def decided(self) -> bool:
        """Whether `decide` leaves one possible token everywhere, so that nothing is drawn."""
        return self.greedy or self._coupled

    @property
    def in_order(self) -> bool:
        """Whether some processor has memory, so that the target's places are scored by `next_scores`, in order."""
        return isinstance(self._processing, SequentialProcessing)

    @property
    def reads_prefixes(self) -> bool:
        """Whether some processor looks at more than the scores of a place."""
        return not isinstance(self._processing, Warping)

    def legible(self, logits: Tensor) -> Tensor | None:
        """Whether tokens can be chosen by the logits of each place of a round without a draft, `[rows, places]`.

        None: by all of them, since processors mend what is not finite.
        """
        return None if self.mends else logits.amax(-1).isfinite()

    def judged(self, draft: Draft) -> Draft:
        """The draft with the distributions that its tokens are judged by: one-hot where all is decided."""
        return draft if draft.probs is None or not self.decided else replace(draft, probs=None)

    def next_scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        """See `SequentialProcessing.next_scores`."""
        assert isinstance(self._processing, SequentialProcessing)
        return self._processing.next_scores(ids, logits)

    def forget_draft(self) -> None:
        """See `SequentialProcessing.forget_draft`."""
        assert isinstance(self._processing, SequentialProcessing)
        self._processing.forget_draft()

    def scores(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        """The logits as processors and warpers leave them, float32 as in `transformers`.

        Args:
            logits: `[batch, tokens, vocab]`, any floating dtype.
            prefixes: what comes before each of these places.

        Returns:
            `[batch, tokens, vocab]`.
        """
        return self._processing.scores(logits, prefixes)

    def probabilities(self, scores: Tensor) -> Tensor:
        """The distribution at each position.

        Args:
            scores: as `scores` gives them, `[batch, tokens, vocab]`.

        Returns:
            `[batch, tokens, vocab]`; rows sum to 1.
        """
        if self.greedy:
            return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        return scores.softmax(-1)

    def decide(self, p: Tensor, positions: Tensor, noise: Noise) -> Tensor:
        """What tokens are drawn from: p itself, or one-hot at what the noise of the position chooses from it.

        Args:
            p: `[batch, tokens, vocab]`.
            positions: of the tokens to be drawn, `[batch or 1, tokens]`.
            noise: of the rows; used by coupled sampling alone.
        """
        if not self._coupled:
            return p
        return torch.zeros_like(p).scatter_(-1, noise.choose(p, positions)[..., None], 1.0)

    def next_tokens(self, scores: Tensor, positions: Tensor, noise: Noise) -> NextTokens:
        """The token of each row where nothing was drafted: `draw` of `decide` of `probabilities`, in fewer steps.

        Args:
            scores: as `scores` gives them, `[rows, 1, vocab]`.
            positions: of the tokens, `[rows or 1, 1]`.
            noise: of the rows.
        """
        if self.greedy:
            return NextTokens(scores.argmax(-1), None)
        p = self.probabilities(scores)
        return NextTokens(self.draw(self.decide(p, positions, noise), noise, Purpose.RECOVER), p.sum(-1).isfinite())

    def draw(self, weights: Tensor, noise: Noise, purpose: Purpose, first: int = 0) -> Tensor:
        """The token each of the given distributions gives: its one possible token where decided, else a draw.

        Args:
            weights: `[batch, tokens, vocab]`, non-negative; they need not be normalised.
            noise: of the rows, not touched where all is decided.
            purpose: what the tokens are for.
            first: the first of these places in the round.

        Returns:
            `[batch, tokens]`.
        """
        return weights.argmax(-1) if self.decided else noise.draw(weights, purpose, first)


def proper(q: Tensor) -> Tensor:
    """`q` with the uniform distribution wherever it is not finite.

    A draft path may overflow where the target does not. Any distribution may draft, as long as it is the one that is
    drawn from and scored.

    Args:
        q: `[..., vocab]`.
    """
    return torch.where(q.sum(-1, keepdim=True).isfinite(), q, 1.0 / q.shape[-1])
