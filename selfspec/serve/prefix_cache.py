"""Caches of rows that have ended, for the next ones that begin alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from selfspec.cache.shared_cache import SharedCache

# What has fewer tokens is read again sooner than it is copied.
FEWEST = 16


@dataclass(frozen=True)
class Known:
    """A cache of one row, and how many of its tokens another text begins with."""

    cache: SharedCache
    tokens: int


class PrefixCache:
    """Caches of rows that have ended, by their tokens, within a bound in bytes; the least used go first.

    Args:
        bound: in bytes; 0: nothing is kept.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        # The last used one is last.
        self._kept: OrderedDict[tuple[int, ...], SharedCache] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        # Other threads may ask.
        return sum(cache.nbytes for cache in list(self._kept.values()))

    def keep(self, tokens: tuple[int, ...], cache: SharedCache) -> None:
        """Keep the cache of a row of these tokens; what it holds more of than another takes its place."""
        for each in [each for each in self._kept if shared(each, tokens) == len(each)]:
            if each == tokens or cache.rolls_back_by_cursor:
                del self._kept[each]
        if not any(len(each) > len(tokens) and each[: len(tokens)] == tokens for each in self._kept):
            self._kept[tokens] = cache
        self.shrink(self.bound)

    def find(self, text: Sequence[int], fits: Callable[[int], bool]) -> Known | None:
        """The cache that holds most of what a text begins with, less its last token; None: none holds enough.

        Of so many tokens it `fits`, or was read otherwise than the text would be.
        """
        tokens = tuple(text[:-1])
        found = {each: shared(each, tokens) for each in self._kept if fits(len(each))}
        # States are those after all tokens.
        whole = {each: n for each, n in found.items() if self._kept[each].rolls_back_by_cursor or n == len(each)}
        best = max(whole, key=lambda each: whole[each], default=None)
        if best is None or whole[best] < FEWEST:
            return None
        self._kept.move_to_end(best)
        return Known(self._kept[best], whole[best])

    def shrink(self, most: int) -> None:
        """Let go of what was not used for longest, until the others take at most so many bytes."""
        left = self.nbytes
        while self._kept and left > most:
            _, cache = self._kept.popitem(last=False)
            left -= cache.nbytes


def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
