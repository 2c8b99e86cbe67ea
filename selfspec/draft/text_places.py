"""Where a text has ended before as it ends now: in itself, in texts that were kept, or in a sorted corpus."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.drafter import DraftMemory

Tokens = NDArray[np.int32]

NONE = -1
"""Between two texts, where nothing matches."""

MOST_PLACES = 64
"""Of one match length: the latest of a text, and of a corpus some that are evenly spread."""


def places_in(tokens: Tokens, context: Sequence[int], longest: int) -> list[NDArray[np.int64]]:
    """Find where a context, of which no token is `NONE`, occurs in a text that may end with it, followed by something.

    Returns:
        Places of what followed, by the number of tokens alike before it, from one to `longest`; none of a length
            that no place has.
    """
    found: list[NDArray[np.int64]] = []
    ends = np.flatnonzero(tokens[:-1] == context[-1]) + 1
    for length in range(1, min(longest, len(context)) + 1):
        if not len(ends):
            break
        found.append(ends[-MOST_PLACES:])
        ends = ends[ends > length]
        if length < len(context):
            ends = ends[tokens[ends - 1 - length] == context[-1 - length]]
    return found


@dataclass(frozen=True)
class Match:
    """The latest earlier place that ends as a text does.

    Attributes:
        end: number of the token that followed it there.
        length: how many tokens are alike, counted back from the end.
    """

    end: int
    length: int


def last_match(tokens: Tokens, shortest: int, longest: int) -> Match | None:
    """Find where most of the last `longest` tokens of a text, at least `shortest`, came last before its end."""
    places = places_in(tokens, tokens[-longest:].tolist(), longest) if len(tokens) else []
    if len(places) < shortest:
        return None
    end = int(places[-1][-1])
    differing = np.flatnonzero(tokens[:end][::-1] != tokens[::-1][:end])
    return Match(end, int(differing[0]) if len(differing) else end)


def following(tokens: Tokens, match: Match, length: int) -> list[int]:
    """Return the `length` tokens after a match; what reaches the end of the text goes round, as a loop would."""
    found: list[int] = tokens[match.end + np.arange(length) % (len(tokens) - match.end)].tolist()
    return found


class OwnText:
    """The text of a row, which grows, behind what it is made of.

    Args:
        source: tokens before the text: what an encoder has read.

    Attributes:
        length: of the text so far, which the source is no part of.
    """

    def __init__(self, source: Sequence[int] = ()) -> None:
        self._tokens: Tokens = np.empty(256, dtype=np.int32)
        self.length = 0
        self._before = 0
        self.extend(source)
        self._before, self.length = len(source), 0

    @property
    def tokens(self) -> Tokens:
        """So far, those of the source first."""
        return self._tokens[: self._before + self.length]

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what comes next."""
        start = self._before + self.length
        if start + len(tokens) > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens), np.asarray(tokens, np.int32)])
        self._tokens[start : start + len(tokens)] = tokens
        self.length += len(tokens)


class TextMemory(DraftMemory):
    """Texts one after another, the latest that its bytes have room for. Each search reads through all of them.

    Attributes:
        tokens: of the texts, with `NONE` after each; another array once there is one more.
    """

    def __init__(self, nbytes: int) -> None:
        self._most = nbytes // 4
        self.tokens: Tokens = np.empty(0, dtype=np.int32)

    def add(self, text: Sequence[int]) -> None:
        """Take in a text, and drop of the oldest what there is no room for."""
        if not self._most:
            return
        kept = np.concatenate([self.tokens, text, [NONE]]).astype(np.int32)
        self.tokens = kept[max(len(kept) - self._most, 0) :]


class SortedCorpus:
    """Texts with `NONE` between them, whose places `sorted_ends` sorted, so that a context is found by halving."""

    def __init__(self, tokens: Tokens, ends: Tokens) -> None:
        self.tokens = tokens
        self._ends = ends

    def places(self, context: Sequence[int], longest: int) -> list[NDArray[np.int64]]:
        """As `places_in`, but for which places of many are returned."""
        found: list[NDArray[np.int64]] = []
        low, high = 0, len(self._ends)
        for length, token in enumerate(reversed(context[-longest:]), 1):

            def before(place: int, back: int = length) -> int:
                start = int(self._ends[place]) - back
                return int(self.tokens[start]) if start >= 0 else NONE

            within = range(low, high)
            low, high = (low + cut(within, token, key=before) for cut in (bisect_left, bisect_right))
            if low >= high:
                break
            chosen = np.linspace(low, high - 1, min(high - low, MOST_PLACES)).astype(np.int64)
            found.append(self._ends[chosen].astype(np.int64))
        return found


def sorted_ends(tokens: Tokens, longest: int) -> Tokens:
    """Sort the places after each token of a text by the tokens before them, the nearest first; `[tokens]`.

    By doubling (Manber and Myers, 1993): once sorted by some tokens, ranks sort by twice as many. Places that are alike
    in at least `longest` tokens are in order of the text.
    """
    ranks, known = tokens.astype(np.int64) - NONE + 1, 1
    while True:
        keys = ranks * (int(ranks.max(initial=0)) + 1)
        keys[known:] += ranks[:-known]
        order = np.argsort(keys, kind="stable")
        if 2 * known >= longest:
            return (order + 1).astype(np.int32)
        ordered = keys[order]
        ranks[order] = np.cumsum(np.diff(ordered, prepend=ordered[:1]) != 0) + 1
        known *= 2
