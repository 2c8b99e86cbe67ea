"""Scores or logits of committed tokens, kept for a caller who asked for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Record:
    """One tensor `[batch, vocab]` for each new token, as `transformers` returns them.

    Where a row has ended and others go on, its entry is that of a sure padding token: 0 for it and -inf for all
    others, normalised or not. So what is summed up over a row is what its own tokens have.

    Args:
        pad: the padding token.
    """

    def __init__(self, pad: int) -> None:
        self._pad = pad
        self._steps: list[Tensor] = []

    @property
    def steps(self) -> tuple[Tensor, ...]:
        """One tensor for each new token, the first token first."""
        return tuple(self._steps)

    def padded(self, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """One tensor for each new token of the longest row, where rows have so many new tokens.

        Args:
            lengths: of the rows; what is kept beyond them is left out.
        """
        return tuple(
            self._with_padding(step, [row for row, length in enumerate(lengths) if length <= index])
            for index, step in enumerate(self._steps[: max(lengths)])
        )

    def keep(self, values: Tensor, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        """Keep what stands for committed tokens of a block, and nothing of tokens that were rejected.

        Args:
            values: `[rows, places, vocab]`, of the rows that passes run.
            rows: their numbers in the batch.
            starts: new tokens that each row of the batch had before.
            counts: places of each row of the batch to keep, from the first.
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
