"""The slots that a draft attends to where it attends to those that the target attended to most."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.device import to_device

CHUNK = 32
"""Slots that are chosen together, from the first on: neighbours are one passage of the text."""

EVERY = 64
"""Tokens that a row may grow by before its slots are chosen anew."""


class TopSlots:
    """Chunks of each row's slots, by what the target's attention to them was, and all of the row's latest slots.

    A row sees all of its slots until it has more than `keys`. Then a quarter of them are its latest, and the others are
    whole chunks; tokens that come later are seen, too. Rows never depend on each other.

    Args:
        rows: of the cache.
        keys: slots that a row sees just after it has chosen, at least `4 * CHUNK`.
        device: of the tensor.
    """

    def __init__(self, rows: int, keys: int, device: torch.device) -> None:
        self.keys = keys
        self._latest = keys // 4
        self._chunks = (keys - self._latest) // CHUNK
        # How many tokens each row had when it chose.
        self._chosen_at: list[int | None] = [None] * rows
        self._seen = torch.zeros(rows, 2, dtype=torch.long, device=device)

    def due(self, seq_lens: Sequence[int]) -> list[int]:
        """Return the rows that are to choose, where rows have so many tokens."""
        return [
            row
            for row, (length, before) in enumerate(zip(seq_lens, self._chosen_at, strict=True))
            if length > self.keys and (before is None or length >= before + EVERY)
        ]

    def choose(self, shares: Tensor, seq_lens: Sequence[int], rows: Sequence[int]) -> None:
        """Choose the slots of some rows.

        Args:
            shares: what the target attended to each slot by, `[rows of the cache, slots]`.
            seq_lens: tokens of each row of the cache.
            rows: that choose, all of which have more than `keys` tokens.
        """
        since = [(seq_lens[row] - self._latest) // CHUNK * CHUNK for row in rows]
        device, chosen = self._seen.device, to_device(list(rows), self._seen.device)
        ends = to_device(since, device)
        width = max(since)
        slots = torch.arange(width, device=device)
        before = torch.where(slots < ends[:, None], shares[chosen, :width].float(), -1.0)
        weights = before.unflatten(1, (-1, CHUNK)).sum(-1)
        top = weights.topk(self._chunks, dim=1).indices.sort(dim=1).values
        ranks = torch.full_like(weights, -1, dtype=torch.long)
        ranks.scatter_(1, top, torch.arange(self._chunks, device=device).expand_as(top))
        counts = torch.full_like(ends, self._chunks)
        self._widen(weights.shape[1])
        self._seen[chosen, 2:] = -1
        self._seen[chosen, : 2 + weights.shape[1]] = torch.cat([torch.stack([ends, counts], 1), ranks], 1)
        for row in rows:
            self._chosen_at[row] = seq_lens[row]

    def narrow(self, rows: Sequence[int]) -> None:
        """Keep only some rows, in the order given."""
        self._chosen_at = [self._chosen_at[row] for row in rows]
        self._seen = self._seen[to_device(list(rows), self._seen.device)]

    def join(self, rows: int) -> None:
        """Add rows behind these, which have chosen nothing."""
        self._chosen_at += [None] * rows
        self._seen = torch.cat([self._seen, self._seen.new_zeros(rows, self._seen.shape[1])])

    def seen(self, capacity: int) -> Tensor:
        """What rows see of their slots, `[rows, 2 + chunks]`, int64, where each has room for `capacity`.

        Of each row it is from which slot on it sees all, how many chunks it sees before that, and of each chunk the
        number among these, or -1 where it does not see it.
        """
        self._widen(-(-capacity // CHUNK))
        return self._seen

    def _widen(self, chunks: int) -> None:
        rows, width = self._seen.shape
        if width < 2 + chunks:
            self._seen = torch.cat([self._seen, self._seen.new_full((rows, 2 + chunks - width), -1)], 1)


def sees(seen: Tensor, row: Tensor, key: Tensor) -> Tensor:
    """Whether rows see slots; `seen` as `TopSlots` gives it, and numbers that broadcast against each other."""
    chunk = key.div(CHUNK, rounding_mode="floor")
    return (key >= seen[row, 0]) | (seen[row, 2 + chunk] >= 0)
