"""Where the end of a text occurred before in it: an index of n-grams that grows with the text, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Match:
    """An earlier place that ends as the text does.

    Attributes:
        end: position of the token that followed it there.
        length: how many tokens are alike, counted back from the end.
    """

    end: int
    length: int


class SuffixIndex:
    """The n-grams of a text, each with its last place.

    Args:
        shortest: tokens of the shortest n-gram that counts as a match, at least 1.
        longest: tokens of the longest that is indexed; longer matches are found by comparing from there on.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Take in what comes next in the text."""
        for token in tokens:
            # An n-gram is entered when the token after it comes: the end of the text is not a place before itself.
            for size in self._sizes:
                if size <= len(self._tokens):
                    self._ends[tuple(self._tokens[-size:])] = len(self._tokens)
            self._tokens.append(token)

    def find(self) -> Match | None:
        """The latest earlier place that ends with the longest indexed n-gram at the end of the text, if any does."""
        for size in self._sizes:
            if size <= len(self._tokens):
                end = self._ends.get(tuple(self._tokens[-size:]))
                if end is not None:
                    return Match(end, self._alike(end, size))
        return None

    def after(self, match: Match, length: int) -> Sequence[int]:
        """The `length` tokens after a match; what reaches the end of the text goes round, as a loop would."""
        period = len(self._tokens) - match.end
        return [self._tokens[match.end + offset % period] for offset in range(length)]

    def _alike(self, end: int, known: int) -> int:
        length = known
        while length < end and self._tokens[end - 1 - length] == self._tokens[-1 - length]:
            length += 1
        return length
