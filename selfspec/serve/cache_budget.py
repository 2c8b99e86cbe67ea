"""The memory of the cache: what rows take within a bound in bytes, and caches of rows that have ended."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from selfspec.cache.shared_cache import SharedCache
from selfspec.decode.text_stream import shared_length
from selfspec.serve.row_decoder import CacheSizes

# What has fewer tokens is read again sooner than it is copied.
FEWEST = 16


@dataclass(frozen=True)
class Storage:
    """Storage of the running batch: rows, and committed tokens that each of them may have."""

    rows: int
    tokens: int


@dataclass(frozen=True)
class CacheBudget:
    """How much the cache may take: `bound` in bytes, `most_rows` of the running batch.

    All rows of the running batch have as many slots as the longest needs; a row that is being read has its own.
    A row is read only if rows can still grow by `margin` tokens: else it might have to give its cache back at once.
    """

    sizes: CacheSizes
    bound: int
    most_rows: int
    margin: int = 64

    @property
    def longest(self) -> int:
        """The most tokens that a row may come to have; 0 where there is no room for a row."""
        spare = self.bound - self.sizes.row
        if self.sizes.slot == 0:
            # States take the same whatever they have read.
            return sys.maxsize if spare >= 0 else 0
        return spare // self.sizes.slot - self.sizes.slack

    def admits(self, rows: int, longest: int, tokens: int, remaining: int) -> bool:
        """Return whether a row of this many tokens, which may grow by `remaining`, may join `rows` others.

        `longest` is the length of the longest that runs; 0 without any.
        """
        if rows == 0:
            return True
        together = max(longest, tokens) + min(remaining, self.margin)
        return self.sizes.of(rows + 1, together) + self.sizes.of(1, tokens) <= self.bound

    def storage(self, now: Storage, rows: int, longest: int, most: int, beside: int) -> Storage | None:
        """Choose storage for `rows`, one of which has `longest` tokens and may grow to `most`; None: they do not fit.

        It is roomy where there is room beside the `beside` bytes that other rows take.
        """
        many = now.rows if now.rows >= rows else min(2 * rows, self.most_rows)
        long = now.tokens if now.tokens >= longest else min(2 * longest, most)
        for choice in (Storage(many, long), Storage(rows, long), Storage(many, longest), Storage(rows, longest)):
            if self.sizes.of(choice.rows, choice.tokens) + beside <= self.bound:
                return choice
        return None


class PrefixCache:
    """Caches of rows that have ended, by their tokens, within a bound in bytes; the least used go first."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        # The last used one is last.
        self._kept: OrderedDict[tuple[int, ...], SharedCache] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all caches. Other threads may ask."""
        return sum(cache.nbytes for cache in list(self._kept.values()))

    def keep(self, tokens: tuple[int, ...], cache: SharedCache) -> None:
        """Keep the cache of a row of these tokens; it replaces caches that hold no more than it does."""
        for each in [each for each in self._kept if shared_length(each, tokens) == len(each)]:
            if each == tokens or cache.rolls_back_by_cursor:
                del self._kept[each]
        if not any(len(each) > len(tokens) and each[: len(tokens)] == tokens for each in self._kept):
            self._kept[tokens] = cache
        self.shrink(self.bound)

    def find(self, text: Sequence[int], fits: Callable[[int], bool]) -> tuple[SharedCache, int] | None:
        """Return the cache that holds most of a text's beginning, its last token left out, and how many tokens of it.

        None: none holds enough.

        Caches of a number of tokens that does not fit are passed over: they were read otherwise than the text would be.
        """
        tokens = tuple(text[:-1])
        found = {each: shared_length(each, tokens) for each in self._kept if fits(len(each))}
        # States are those after all tokens.
        whole = {each: n for each, n in found.items() if self._kept[each].rolls_back_by_cursor or n == len(each)}
        best = max(whole, key=lambda each: whole[each], default=None)
        if best is None or whole[best] < FEWEST:
            return None
        self._kept.move_to_end(best)
        return self._kept[best], whole[best]

    def shrink(self, most: int) -> None:
        """Drop the least used caches, until the others take at most so many bytes."""
        left = self.nbytes
        while self._kept and left > most:
            _, cache = self._kept.popitem(last=False)
            left -= cache.nbytes
