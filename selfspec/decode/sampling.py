"""Logits to probabilities, once and the same for target p and draft q; and draws from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.generation import InfNanRemoveLogitsProcessor

from selfspec.decode.noise import Coupling
from selfspec.decode.processors import Processing, SequentialProcessing, Warping
from selfspec.decode.sequences import Prefixes


@dataclass(frozen=True)
class Left:
    """The rows that are left of a batch.

    Attributes:
        rows: their numbers.
        batch: how many there were.
    """

    rows: tuple[int, ...]
    batch: int


class Sampling:
    """Turns logits into the distribution that plain decoding would draw from.

    Args:
        processing: what logits go through first, the same for target and draft.
        greedy: whether the distribution is one-hot at the largest score.
        coupling: chooses tokens by the noise of their place; None: by independent draws.
        left: the rows of the batch that are still run; None: all.

    Attributes:
        greedy: as given.
        mends: whether processors put numbers in the place of logits that are not finite.
    """

    def __init__(
        self, processing: Processing, greedy: bool, coupling: Coupling | None = None, left: Left | None = None
    ) -> None:
        self._processing = processing
        self._coupling = coupling
        self._left = left
        self.greedy = greedy
        self.mends = any(type(each) is InfNanRemoveLogitsProcessor for each in processing.processors)

    def coupled(self, seed: int) -> Sampling:
        """The same distributions, with tokens chosen by the noise of their place. Greedy decoding needs none."""
        return self if self.greedy else Sampling(self._processing, greedy=False, coupling=Coupling(seed))

    def narrowed(self, rows: Sequence[int], batch: int) -> Sampling:
        """The same for a batch of which only the rows of these numbers are left.

        Noise is still drawn for the whole batch, so that a row gets the same whichever others are left.
        """
        coupling = self._coupling and self._coupling.narrowed(rows)
        return Sampling(self._processing, self.greedy, coupling, Left(tuple(rows), batch))

    def left(self, noise: Tensor) -> Tensor:
        """Of noise for the whole batch, `[batch, ...]`, that of the rows that are left."""
        return noise if self._left is None else noise[list(self._left.rows)]

    @property
    def decided(self) -> bool:
        """Whether `decide` leaves one possible token everywhere, so that nothing is drawn."""
        return self.greedy or self._coupling is not None

    @property
    def in_order(self) -> bool:
        """Whether some processor has memory, so that the target's places are scored by `next_scores`, in order."""
        return isinstance(self._processing, SequentialProcessing)

    @property
    def reads_prefixes(self) -> bool:
        """Whether some processor looks at more than the scores of a place."""
        return not isinstance(self._processing, Warping)

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
            prefixes: what stands before each of these places.

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

    def decide(self, p: Tensor, positions: Tensor) -> Tensor:
        """What tokens are drawn from: p itself, or one-hot at what the noise of the place chooses from it.

        Args:
            p: `[batch, tokens, vocab]`.
            positions: of the tokens to be drawn, `[batch or 1, tokens]`.
        """
        if self._coupling is None:
            return p
        return torch.zeros_like(p).scatter_(-1, self._coupling.choose(p, positions)[..., None], 1.0)

    def draw(self, weights: Tensor, generator: torch.Generator) -> Tensor:
        """The token each of the given distributions gives: its one possible token where decided, else a draw.

        Args:
            weights: `[..., vocab]`, non-negative; they need not be normalised.
            generator: the source of randomness, not touched where all is decided.

        Returns:
            `[...]`.
        """
        if self.decided:
            return weights.argmax(-1)
        if self._left is None:
            return draw(weights, generator)
        whole = weights.new_ones(self._left.batch, *weights.shape[1:])
        whole[list(self._left.rows)] = weights
        return self.left(draw(whole, generator))


def draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One draw from each of the given distributions, without a host synchronisation.

    Args:
        weights: `[..., vocab]`, non-negative, each with a positive entry; they need not be normalised.
        generator: the source of randomness, on the device of `weights`.

    Returns:
        `[...]`, the indices drawn.
    """
    # A CPU takes longer for a logarithm of each entry than for all passes over a small model's head; on a GPU sums in
    # turn would be the slow part, and not reproducible.
    by = drawn_by_inversion if weights.device.type == "cpu" else drawn_by_race
    return by(weights, generator)


def drawn_by_inversion(weights: Tensor, generator: torch.Generator) -> Tensor:
    """`draw` by one uniform number for each distribution, looked up in its cumulative sums.

    Both are double, so what rounding does to a probability is less than the 2^-24 that a float32 p is rounded by.
    """
    sums = weights.double().cumsum(-1)
    total = sums[..., -1:]
    places = torch.rand(total.shape, generator=generator, dtype=sums.dtype, device=sums.device) * total
    # The product may be rounded up to the total itself, behind which nothing stands.
    places = torch.minimum(places, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(sums, places, right=True)[..., 0]
    return found.clamp(max=weights.shape[-1] - 1)


def drawn_by_race(weights: Tensor, generator: torch.Generator) -> Tensor:
    """`draw` by the exponential race.

    The largest of w_i / e_i with independent unit exponentials e_i falls on i with probability proportional to w_i.
    """
    noise = torch.empty_like(weights).exponential_(generator=generator)
    # exponential_ may return 0, and 0 / 0 would win the race as NaN.
    return (weights / noise.clamp_min_(torch.finfo(noise.dtype).tiny)).argmax(-1)


def proper(q: Tensor) -> Tensor:
    """`q` with the uniform distribution wherever it is not finite.

    A draft path may overflow where the target does not. Any distribution may draft, as long as it is the one that is
    drawn from and scored.

    Args:
        q: `[..., vocab]`.
    """
    return torch.where(q.sum(-1, keepdim=True).isfinite(), q, 1.0 / q.shape[-1])
