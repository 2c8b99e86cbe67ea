"""Finding earlier places that end as a text does now: in the text itself, in kept texts, or in a sorted corpus."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.drafter import DraftMemory

Tokens = NDArray[np.int32]

NONE = -1
"""Separator between two texts, which matches no token."""

MOST_PLACES = 64
"""The most places of one match length: the latest of a text, or evenly spread ones of a corpus."""


def places_in(tokens: Tokens, context: Sequence[int], longest: int) -> list[NDArray[np.int64]]:
    """Find a context in a text that may end with it; the match at the end does not count, as nothing follows it.

    No token of the context may be `NONE`.

    Returns:
        Places of the tokens that follow a match, for each match length from one to `longest` that occurs.
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
    """Holds the latest earlier place that ends as a text does.

    Attributes:
        end: number of the token that follows it.
        length: number of equal tokens, counted back from the end.
    """

    end: int
    length: int


def last_match(tokens: Tokens, shortest: int, longest: int) -> Match | None:
    """Find the longest earlier match, of `shortest` to `longest` tokens, of the end of a text; the latest of these."""
    places = places_in(tokens, tokens[-longest:].tolist(), longest) if len(tokens) else []
    if len(places) < shortest:
        return None
    end = int(places[-1][-1])
    differing = np.flatnonzero(tokens[:end][::-1] != tokens[::-1][:end])
    return Match(end, int(differing[0]) if len(differing) else end)


def following(tokens: Tokens, match: Match, length: int) -> list[int]:
    """Return the `length` tokens after a match; at the end of the text they start again behind the match, as a loop."""
    found: list[int] = tokens[match.end + np.arange(length) % (len(tokens) - match.end)].tolist()
    return found


class OwnText:
    """Holds the growing text of a row, behind the row's source.

    Args:
        source: tokens before the text, which an encoder has read.

    Attributes:
        length: tokens of the text so far, without the source.
    """

    def __init__(self, source: Sequence[int] = ()) -> None:
        self._tokens: Tokens = np.empty(256, dtype=np.int32)
        self.length = 0
        self._before = 0
        self.extend(source)
        self._before, self.length = len(source), 0

    @property
    def tokens(self) -> Tokens:
        """Tokens of the source, then those of the text so far."""
        return self._tokens[: self._before + self.length]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        start = self._before + self.length
        if start + len(tokens) > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens), np.asarray(tokens, np.int32)])
        self._tokens[start : start + len(tokens)] = tokens
        self.length += len(tokens)


class TextMemory(DraftMemory):
    """Keeps the latest texts that fit into its bytes, one after another. Each search reads through all of them.

    Attributes:
        tokens: tokens of the texts, with `NONE` after each; adding a text makes a new array.
    """

    def __init__(self, nbytes: int) -> None:
        self._most = nbytes // 4
        self.tokens: Tokens = np.empty(0, dtype=np.int32)

    def add(self, text: Sequence[int]) -> None:
        """Add a text, and drop the oldest tokens that no longer fit."""
        if not self._most:
            return
        kept = np.concatenate([self.tokens, text, [NONE]]).astype(np.int32)
        self.tokens = kept[max(len(kept) - self._most, 0) :]


class SortedCorpus:
    """Holds texts with `NONE` between them, and their places sorted by `sorted_ends`, for binary search of contexts."""

    def __init__(self, tokens: Tokens, ends: Tokens) -> None:
        self.tokens = tokens
        self._ends = ends

    def places(self, context: Sequence[int], longest: int) -> list[NDArray[np.int64]]:
        """Find a context as `places_in` does; of many places, return evenly spread ones."""
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
    """Sort the places after each token of a text by the tokens before them, compared from the nearest on; `[tokens]`.

    It works by doubling (Manber and Myers, 1993): ranks by some tokens sort by twice as many. Places with at least
    `longest` equal tokens keep the order of the text.
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
