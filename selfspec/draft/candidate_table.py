"""What may follow each token: the likeliest candidates that passes of the target last gave."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

NONE = -1
"""In place of a candidate where none is known."""


class CandidateTable:
    """The likeliest next tokens after each token, as the target last gave them: the matrix of Token Recycling.

    It takes 4 bytes for each candidate of each token up to the largest seen. Several generations may share it.

    Args:
        kept: candidates kept for each token, at least 1.
    """

    def __init__(self, kept: int) -> None:
        self._rows: NDArray[np.int32] = np.full((1, kept), NONE, dtype=np.int32)

    @property
    def kept(self) -> int:
        """Candidates kept for each token."""
        return int(self._rows.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes that the table takes."""
        return self._rows.nbytes

    def after(self, tokens: NDArray[np.int64], rank: int) -> NDArray[np.int32]:
        """Return the candidate of a rank after each token, in the shape of `tokens`; `NONE` where there is none.

        Args:
            tokens: token ids, of any shape.
            rank: 0 for the likeliest.
        """
        rows = self._rows
        if rank >= rows.shape[1]:
            return np.full(tokens.shape, NONE, dtype=np.int32)
        return np.where(tokens < len(rows), rows[np.minimum(tokens, len(rows) - 1), rank], NONE)

    def learn(self, tokens: NDArray[np.int64], candidates: NDArray[np.int64]) -> None:
        """Replace the candidates after some tokens; of a token that comes twice the last ones count.

        Args:
            tokens: token ids, `[n]`.
            candidates: the likeliest first, `[n, kept]`.
        """
        self._hold(int(tokens.max(initial=0)))
        self._rows[tokens] = candidates

    def learn_text(self, tokens: Sequence[int]) -> None:
        """Take in a text that no pass has judged: what follows a token there becomes its first candidate."""
        self._hold(max(tokens, default=0))
        for token, follower in pairwise(tokens):
            row = self._rows[token]
            known = np.flatnonzero(row == follower)
            last = int(known[0]) if len(known) else len(row) - 1
            row[1 : last + 1] = row[:last].copy()
            row[0] = follower

    def _hold(self, token: int) -> None:
        if token >= len(self._rows):
            more = max(token + 1, 2 * len(self._rows)) - len(self._rows)
            self._rows = np.pad(self._rows, ((0, more), (0, 0)), constant_values=NONE)
