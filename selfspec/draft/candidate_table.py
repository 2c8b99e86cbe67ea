"""A table of the likeliest next tokens after contexts, as passes of the target last gave them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from selfspec.cache.tree import Tree

NONE = -1
"""Stands for an unknown candidate, and for a token before the beginning of a text."""

# Odd factor and shift of the hash of a context.
_FACTOR, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)
# Places of a context that count in one text, the last ones, for each candidate kept.
_PLACES = 2


@dataclass(frozen=True)
class Found:
    """Holds the candidates found at some places.

    Attributes:
        candidates: the likeliest first, `NONE` where there is none, `[..., kept]`.
        lengths: tokens of the longest known context at each place, 0 for none, `[...]`.
    """

    candidates: NDArray[np.int32]
    lengths: NDArray[np.int64]


class CandidateTable:
    """Keeps the likeliest next tokens after contexts of one to a few tokens, as the target last gave them.

    With contexts of one token it is the matrix of Token Recycling. Its size is limited: a context lies at the place of
    its hash, where a newer context replaces an older one. Several generations may share a table.

    `kept` candidates are kept for each context of up to `longest` tokens. Where the table `under` it knows a longer
    context, that table is read; it is never changed.
    """

    def __init__(self, kept: int, longest: int, nbytes: int, under: CandidateTable | None = None) -> None:
        places = max(nbytes // (longest * (8 + 4 * kept)), 1)
        self._under = under
        # DraftMemory is taken as places are written to.
        self._keys: NDArray[np.uint64] = np.zeros((longest, places), dtype=np.uint64)
        self._rows: NDArray[np.int32] = np.zeros((longest, places, kept), dtype=np.int32)

    @property
    def kept(self) -> int:
        """Candidates kept for each context."""
        return int(self._rows.shape[2])

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return len(self._keys)

    @property
    def nbytes(self) -> int:
        """Bytes of the contexts that it holds."""
        return int(np.count_nonzero(self._keys)) * (8 + 4 * self.kept)

    def find(self, contexts: NDArray[np.int64]) -> Found:
        """Return the candidates after contexts, `[..., longest]`, for the longest known end of each context."""
        keys = _keys(contexts.reshape(-1, self.longest))
        lengths, places = np.arange(self.longest), self._places(keys)
        known = self._keys[lengths, places] == keys
        found = np.where(known, lengths + 1, 0).max(1)
        rows = self._rows[found - 1, places[np.arange(len(keys)), found - 1]]
        rows[found == 0] = NONE
        if self._under is not None:
            below = self._under.find(contexts.reshape(-1, self.longest))
            rows = np.where((below.lengths > found)[:, None], below.candidates, rows)
            found = np.maximum(below.lengths, found)
        return Found(rows.reshape(*contexts.shape[:-1], self.kept), found.reshape(contexts.shape[:-1]))

    def learn(self, contexts: NDArray[np.int64], candidates: NDArray[np.int64]) -> None:
        """Replace the candidates after some contexts; if a context comes twice, its last candidates count.

        Contexts are `[n, longest]`, candidates `[n, kept]` or fewer, the likeliest first.
        """
        keys = _keys(contexts)
        lengths, places = np.arange(self.longest), self._places(keys)
        missing = self.kept - candidates.shape[1]
        self._keys[lengths, places] = keys
        self._rows[lengths, places] = np.pad(candidates, ((0, 0), (0, missing)), constant_values=NONE)[:, None]

    def learn_text(self, tokens: Sequence[int]) -> None:
        """Learn from a text that no pass has judged: the token after a context becomes its first candidate."""
        if len(tokens) < 2:
            return
        padded = np.array([*[NONE] * (self.longest - 1), *tokens])
        contexts = np.lib.stride_tricks.sliding_window_view(padded, self.longest)[:-1]
        followers = padded[self.longest :]
        for length, keys in enumerate(_keys(contexts).T):
            # How often each context comes again later in the text; those with most repetitions are learnt first.
            order = np.argsort(keys, kind="stable")
            _, firsts, counts = np.unique(keys[order], return_index=True, return_counts=True)
            again = np.repeat(firsts + counts, counts) - 1 - np.arange(len(order))
            for turn in range(min(int(counts.max()), _PLACES * self.kept) - 1, -1, -1):
                chosen = order[again == turn]
                self._put_first(length, keys[chosen], followers[chosen])

    def grown(self, contexts: NDArray[np.int64], tree: Tree) -> NDArray[np.int64]:
        """Return the token of each node, `[rows, nodes]`, after contexts `[rows, longest]`.

        Siblings of the tree are the likeliest candidates of their place, in order.
        """
        tokens = np.empty((len(contexts), len(tree)), dtype=np.int64)
        ends, known = {-1: contexts}, {}
        for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
            if parent not in known:
                known[parent] = self.find(ends[parent]).candidates
            found = known[parent][:, rank]
            # Any guess keeps the output exact.
            tokens[:, node] = np.where(found == NONE, ends[parent][:, -1], found)
            ends[node] = np.column_stack([ends[parent][:, 1:], tokens[:, node]])
        return tokens

    def take(self, other: CandidateTable) -> None:
        """Copy all contexts that another table holds itself; both tables have the same `kept` and `longest`."""
        for length, keys in enumerate(other._keys):
            held = np.flatnonzero(keys)
            places = self._places(keys[held])
            self._keys[length, places], self._rows[length, places] = keys[held], other._rows[length, held]

    def _held(self, length: int, keys: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Return the candidates after contexts, `[n, kept]`, `NONE` for unknown contexts."""
        places = self._places(keys)
        below = NONE if self._under is None else self._under._held(length, keys)
        return np.where((self._keys[length, places] == keys)[:, None], self._rows[length, places], below)

    def _put_first(self, length: int, keys: NDArray[np.uint64], tokens: NDArray[np.int64]) -> None:
        """Put one token before the other candidates of each context; all contexts differ."""
        places = self._places(keys)
        rows = self._held(length, keys)
        same = rows == tokens[:, None]
        last = np.where(same.any(1), same.argmax(1), self.kept - 1)
        rows = np.where(np.arange(self.kept) <= last[:, None], np.roll(rows, 1, axis=1), rows)
        rows[:, 0] = tokens
        self._keys[length, places], self._rows[length, places] = keys, rows

    def _places(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return ((keys >> _SHIFT) % np.uint64(self._keys.shape[1])).astype(np.int64)


def _keys(contexts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a hash of the last token of each context, its last two, ... all: `[n, longest]`; 0 is for no context."""
    tokens = (contexts[:, ::-1] + 2).astype(np.uint64)
    keys = np.empty_like(tokens)
    key = np.ones(len(tokens), dtype=np.uint64)
    for length in range(tokens.shape[1]):
        key = (key ^ tokens[:, length]) * _FACTOR
        key ^= key >> _SHIFT
        keys[:, length] = key
    return keys
