"""Sampling of rows that each have their own temperature, filters, processors and seed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from selfspec.decode.noise import Noise
from selfspec.decode.rows.row import Row
from selfspec.decode.sampling import NextTokens, Sampling
from selfspec.decode.sequences import Prefixes
from selfspec.draft import Draft


class JoinedSampling(Sampling):
    """Turns the logits of each row into its own distribution.

    Greedy and coupled rows have one possible token at each place, so that nothing is drawn for them; others beside them
    draw. Rows of one kind are processed together, and those that look at their prefix each by itself.

    Args:
        rows: in the order in which tensors hold them.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.greedy = all(row.sampling.greedy for row in rows)
        self.mends = all(row.sampling.mends for row in rows)
        self._mending = [index for index, row in enumerate(rows) if row.sampling.mends]
        self._greedy = [index for index, row in enumerate(rows) if row.sampling.greedy]
        self._choosing = [index for index, row in enumerate(rows) if row.sampling.decided and not row.sampling.greedy]
        self._drawn = [index for index, row in enumerate(rows) if not row.sampling.decided]
        self._alone = [index for index, row in enumerate(rows) if row.sampling.reads_prefixes]
        kinds: dict[Hashable, list[int]] = {}
        for index, row in enumerate(rows):
            if not row.sampling.reads_prefixes:
                kinds.setdefault(row.kind, []).append(index)
        self._together = list(kinds.values())

    @property
    def decided(self) -> bool:
        return not self._drawn

    @property
    def in_order(self) -> bool:
        return any(row.sampling.in_order for row in self._rows)

    @property
    def reads_prefixes(self) -> bool:
        return bool(self._alone)

    def scores(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        """As in `Sampling`. Where a row's processor raises, the row notes it, and its scores are NaN."""

        def broken(row: Row, error: Exception, given: Tensor) -> Tensor:
            row.error = error
            return torch.full_like(given, torch.nan, dtype=torch.float32)

        return self._scores(logits, prefixes.drafted, broken)

    def draft_scores(self, logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        """The same for draft tokens. Where a processor raises, at what the target may never read, logits do."""
        return self._scores(logits, drafted, lambda row, error, given: given.float())

    def _scores(
        self, logits: Tensor, drafted: Sequence[Tensor], broken: Callable[[Row, Exception, Tensor], Tensor]
    ) -> Tensor:
        if not self._alone and len(self._together) == 1:
            return self._rows[0].sampling.scores(logits, Prefixes(self._rows[0].sequences))
        scores = torch.empty_like(logits, dtype=torch.float32)
        for indices in self._together:
            first = self._rows[indices[0]]
            scores[indices] = first.sampling.scores(logits[indices], Prefixes(first.sequences))
        for index in self._alone:
            row, given = self._rows[index], logits[index : index + 1]
            prefixes = Prefixes(row.sequences, [piece[index : index + 1] for piece in drafted])
            try:
                found = row.sampling.scores(given, prefixes)
            except Exception as error:
                found = broken(row, error, given)
            scores[index : index + 1] = found
        return scores

    def probabilities(self, scores: Tensor) -> Tensor:
        if self.greedy or not self._greedy:
            p = super().probabilities(scores)
        else:
            p = scores.softmax(-1)
            best = scores[self._greedy].argmax(-1, keepdim=True)
            p[self._greedy] = torch.zeros_like(p[self._greedy]).scatter_(-1, best, 1.0)
        for index in self._alone:
            if self._rows[index].error is not None:
                p[index] = torch.nan
        return p

    def decide(self, p: Tensor, positions: Tensor, noise: Noise) -> Tensor:
        if not self._choosing:
            return p
        own = noise if len(self._choosing) == len(p) else noise.narrowed(self._choosing)
        chosen = own.choose(p[self._choosing], positions.expand(len(p), -1)[self._choosing])
        decided = p.clone()
        decided[self._choosing] = torch.zeros_like(p[self._choosing]).scatter_(-1, chosen[..., None], 1.0)
        return decided

    def next_tokens(self, scores: Tensor, positions: Tensor, noise: Noise) -> NextTokens:
        found = super().next_tokens(scores, positions, noise)
        broken = [index for index in self._alone if self._rows[index].error is not None]
        if not broken or found.finite is not None:
            return found
        finite = torch.ones_like(found.tokens, dtype=torch.bool)
        finite[broken] = False
        return replace(found, finite=finite)

    def legible(self, logits: Tensor) -> Tensor | None:
        if self.mends:
            return None
        finite = logits.amax(-1).isfinite()
        finite[self._mending] = True
        return finite

    def judged(self, draft: Draft) -> Draft:
        if self.decided or draft.probs is None or len(self._drawn) == len(self._rows):
            return super().judged(draft)
        probs = torch.zeros_like(draft.probs).scatter_(-1, draft.tokens[..., None], 1.0)
        probs[self._drawn] = draft.probs[self._drawn]
        return replace(draft, probs=probs)
