"""Reading one row's text in chunks, beside the rounds of a running batch."""

from __future__ import annotations

import torch

from selfspec.decode.rows.batch import RowsBatch


class RowPrefill:
    """Fills the cache of a batch of one row with its text but the last token, which its first round reads.

    Args:
        batch: of one row, before its first pass.
    """

    def __init__(self, batch: RowsBatch) -> None:
        self.batch = batch
        text = batch.rows[0].text
        self._tokens = torch.tensor([text[:-1]], dtype=torch.long, device=batch.last_tokens.device)

    @property
    def left(self) -> int:
        """Tokens that are not read yet."""
        return self._tokens.shape[1] - self.batch.cache.seq_lens[0]

    @torch.no_grad()
    def read(self, most: int) -> int:
        """Read at most so many tokens; return how many were. Layers with states read all that is left at once."""
        start = self.batch.cache.seq_lens[0]
        width = min(most, self.left) if self.batch.cache.rolls_back_by_cursor else self.left
        if width > 0:
            self.batch.runner.prefill(self._tokens[:, start : start + width], [width])
            self.batch.cache.commit([width])
        return width
