"""Views of the cache: a pass attends to all of it, or to a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.device import to_device


@dataclass(frozen=True)
class Window:
    """Limits attention to the latest positions of a text, the token's own included, and the first ones, the sinks.

    Without the first few a model fails (StreamingLLM; Xiao et al., 2024, arXiv 2309.17453).
    """

    recent: int
    sinks: int


@dataclass(frozen=True)
class CacheView:
    """Says what the tokens of a pass attend to: all, a window, or the `top_keys` that the target attended to most.

    The target always attends to all of the cache.
    """

    window: Window | None = None
    top_keys: int | None = None


WHOLE = CacheView()
"""All of the cache."""


@dataclass(frozen=True)
class Seen:
    """Holds a view, and the tensor that says what the tokens of one pass attend to through it."""

    view: CacheView = WHOLE
    top: Tensor | None = None  # slots that rows see, as from `TopSlots.seen`; None: all


EVERYTHING = Seen()


CHUNK = 32
"""Number of neighbouring slots that are chosen together: they are one passage of the text."""

EVERY = 64
"""Tokens that a row may grow by before its slots are chosen anew."""


class TopSlots:
    """Chooses the chunks of each row's slots that got most of the target's attention; its latest slots are always seen.

    A row sees all of its slots until it has more than `keys`, at least `4 * CHUNK`. Then a quarter of `keys` are its
    latest slots, the rest whole chunks; it also sees tokens added later. Rows do not depend on each other.
    """

    def __init__(self, rows: int, keys: int, device: torch.device) -> None:
        self.keys = keys
        self._latest = keys // 4
        self._chunks = (keys - self._latest) // CHUNK
        # Number of tokens of each row when it last chose.
        self._chosen_at: list[int | None] = [None] * rows
        self._seen = torch.zeros(rows, 2, dtype=torch.long, device=device)

    def due(self, seq_lens: Sequence[int]) -> list[int]:
        """Return the rows that must choose, given the number of tokens of each row."""
        return [
            row
            for row, (length, before) in enumerate(zip(seq_lens, self._chosen_at, strict=True))
            if length > self.keys and (before is None or length >= before + EVERY)
        ]

    def choose(self, shares: Tensor, seq_lens: Sequence[int], rows: Sequence[int]) -> None:
        """Choose the slots of rows that have more than `keys` tokens, by the target's attention, `[rows, slots]`."""
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
        """Append rows that have chosen nothing yet."""
        self._chosen_at += [None] * rows
        self._seen = torch.cat([self._seen, self._seen.new_zeros(rows, self._seen.shape[1])])

    def seen(self, capacity: int) -> Tensor:
        """Return the slots that rows with `capacity` slots see, `[rows, 2 + chunks]`, int64.

        Columns: first slot from which on all is seen; number of chunks seen before it; rank of each chunk, or -1 if
        unseen.
        """
        self._widen(-(-capacity // CHUNK))
        return self._seen

    def _widen(self, chunks: int) -> None:
        rows, width = self._seen.shape
        if width < 2 + chunks:
            self._seen = torch.cat([self._seen, self._seen.new_full((rows, 2 + chunks - width), -1)], 1)


def sees(seen: Tensor, row: Tensor, key: Tensor) -> Tensor:
    """Return whether rows see slots, given `TopSlots.seen`; numbers of rows and slots broadcast."""
    chunk = key.div(CHUNK, rounding_mode="floor")
    return (key >= seen[row, 0]) | (seen[row, 2 + chunk] >= 0)
