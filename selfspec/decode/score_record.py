"""Record scores and logits of committed tokens for a caller who asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at the place of one committed token, by the model's own logits, before processors and filters.

    Attributes:
        logprob: of the token.
        top: the likeliest tokens with their log-probabilities, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class LogprobRecord:
    """Keeps the log-probabilities at a round's places until their tokens are known.

    Args:
        top: number of likeliest tokens to report.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._places: list[Tensor] = []

    def keep(self, logits: Tensor) -> None:
        """Keep the logits of the next places, `[places, vocab]`."""
        self._places += logits.float().log_softmax(-1).unbind()

    def take(self, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """Return the log-probabilities at the places of the tokens that the round committed, and drop what was kept."""
        places, self._places = self._places[: len(tokens)], []
        found = []
        for place, token in zip(places, tokens, strict=True):
            best = place.topk(min(self._top, len(place)))
            top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            found.append(TokenLogprobs(float(place[token]), top))
        return tuple(found)


class ScoreRecord:
    """One tensor `[batch, vocab]` for each new token, as `transformers` returns them.

    After a row has ended, its entry is 0 for the padding token and -inf for all other tokens, normalised or not. So a
    sum over a row counts its own tokens alone.

    Args:
        pad: the padding token.
    """

    def __init__(self, pad: int) -> None:
        self._pad = pad
        self._steps: list[Tensor] = []

    @property
    def steps(self) -> tuple[Tensor, ...]:
        """Tensors of the new tokens, the first token first."""
        return tuple(self._steps)

    def padded(self, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """Return one tensor for each new token of the longest row.

        Args:
            lengths: new tokens of each row; later entries are left out.
        """
        return tuple(
            self._with_padding(step, [row for row, length in enumerate(lengths) if length <= index])
            for index, step in enumerate(self._steps[: max(lengths)])
        )

    def keep(self, values: Tensor, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        """Keep the values of a block's committed tokens, not of rejected tokens.

        Args:
            values: `[rows, places, vocab]`, of the running rows.
            rows: their numbers in the batch.
            starts: number of new tokens of each row of the batch before the first place.
            counts: number of places to keep of each row of the batch, from the first.
        """
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        while len(self._steps) < longest:
            self._steps.append(values.new_zeros(len(starts), values.shape[-1], dtype=torch.float32))
        for index, row in enumerate(rows):
            for place in range(counts[row]):
                self._steps[starts[row] + place][row] = values[index, place]

    def _with_padding(self, step: Tensor, rows: list[int]) -> Tensor:
        if not rows:
            return step
        padding = torch.full_like(step[0], -torch.inf)
        padding[self._pad : self._pad + 1] = 0.0
        step = step.clone()
        step[rows] = padding
        return step


@dataclass(frozen=True)
class ScoreRecords:
    """Records of committed tokens that the caller asked for.

    Attributes:
        scores: the logits after processors and warpers; None: the caller did not ask for them.
        logits: the target's own logits; None: the caller did not ask for them.
        logprobs: log-probabilities of the tokens of a group of one row; None: the caller did not ask for them.
    """

    scores: ScoreRecord | None = None
    logits: ScoreRecord | None = None
    logprobs: LogprobRecord | None = None

    def keep(
        self, scores: Tensor, logits: Tensor, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> tuple[Tensor, ...] | None:
        """Record tokens about to be committed. Arguments as in `ScoreRecord.keep`.

        Returns:
            The scores of all new tokens so far, one `[batch, vocab]` each; None if they are not kept.
        """
        if self.logprobs is not None:
            self.logprobs.keep(logits[0, : counts[0]])
        if self.logits is not None:
            self.logits.keep(logits, rows, starts, counts)
        if self.scores is None:
            return None
        self.scores.keep(scores, rows, starts, counts)
        return self.scores.steps
