"""Drafting without a model: the tokens that followed an earlier match of the text's end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import Drafter, FreeProposer, drafter
from selfspec.draft.rows_view import RowsView, chains
from selfspec.errors import DraftConfigError

_LONGEST = 64


@drafter("lookup", help="copies from the text so far")
@dataclass(frozen=True)
class PromptLookup(Drafter):
    """Copies from prompt and output: prompt look-up decoding (Saxena, 2023; LLMA, Yang et al., 2023).

    Nothing is drawn, so q is one-hot. A row without a match gets its last token as filler.

    Attributes:
        shortest: tokens of the shortest match that counts, at least 1.
        longest: most tokens of a match that count, at most 64. The latest of the longest matches is copied.
    """

    shortest: int = 2
    longest: int = 5

    def __post_init__(self) -> None:
        whole = all(type(size) is int for size in (self.shortest, self.longest))
        if not whole or not 1 <= self.shortest <= self.longest <= _LONGEST:
            raise DraftConfigError(
                f"look-ups need match lengths 1 <= shortest <= longest <= {_LONGEST}, got {self.shortest!r} and "
                f"{self.longest!r}"
            )

    def begin(self, rows: RowsView) -> LookUpProposer:
        return LookUpProposer(self.shortest, self.longest, map(rows.source, range(rows.size)))

    @classmethod
    def variants(cls, depth: int) -> Sequence[Drafter]:
        return (cls(),)


class TextProposer(FreeProposer):
    """Drafts from what each row's own text and its source repeat."""

    row_states: Sequence[OwnText]

    def __init__(self, sources: Iterable[Sequence[int]]) -> None:
        self.row_states = [OwnText(source) for source in sources]

    def text_of(self, rows: RowsView, row: int) -> Tokens:
        """Return the tokens of a row's source and text."""
        text = self.row_states[row]
        text.extend(rows.text(row, text.length))
        return text.tokens


class LookUpProposer(TextProposer):
    """Copies from each row's own text and its source."""

    def __init__(self, shortest: int, longest: int, sources: Iterable[Sequence[int]]) -> None:
        super().__init__(sources)
        self._shortest, self._longest = shortest, longest

    def look_up(self, rows: RowsView, budget: Budget) -> Draft:
        """Propose a chain; none if no unfinished row has a match, or too few rows have one for it to pay."""
        pacing = rows.pacing
        found: list[list[int]] = []
        # Match lengths of the pacing rows: in one generation, progress of other rows does not end the batch sooner.
        behind: list[int] = []
        for row in rows.running:
            text = self.text_of(rows, row)
            match = last_match(text, self._shortest, self._longest) if row in rows.unfinished else None
            if row in pacing:
                behind.append(0 if match is None else match.length)
            found.append([] if match is None else following(text, match, budget.depth))
        if not any(found):
            return rows.no_draft()
        share = sum(match > 0 for match in behind) / len(behind)
        most = min(budget.depth, rows.controller.look_up_length(share))
        # The row with the shortest match limits the batch.
        least = max(min(behind), self._shortest)
        return chains(rows, [row[:most] for row in found], match_length=least)


Tokens = NDArray[np.int32]

NONE = -1
"""Separator between two texts, which matches no token."""

MOST_PLACES = 64
"""The most places of one match length: the latest of a text."""


def places_in(tokens: Tokens, context: Sequence[int], longest: int) -> list[NDArray[np.int64]]:
    """Return the places after a context without `NONE` in a text, for each match length from 1 that occurs."""
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
    """Holds the place after the latest earlier match of a text's end, and the number of equal tokens."""

    end: int
    length: int


def last_match(tokens: Tokens, shortest: int, longest: int) -> Match | None:
    """Return the latest of the longest earlier matches, of `shortest` to `longest` tokens, of a text's end."""
    places = places_in(tokens, tokens[-longest:].tolist(), longest) if len(tokens) else []
    if len(places) < shortest:
        return None
    end = int(places[-1][-1])
    differing = np.flatnonzero(tokens[:end][::-1] != tokens[::-1][:end])
    return Match(end, int(differing[0]) if len(differing) else end)


def following(tokens: Tokens, match: Match, length: int) -> list[int]:
    """Return the `length` tokens after a match; at the text's end they start again after the match."""
    found: list[int] = tokens[match.end + np.arange(length) % (len(tokens) - match.end)].tolist()
    return found


class OwnText:
    """Holds a row's growing text, of `length` tokens, after its source, which an encoder has read."""

    def __init__(self, source: Sequence[int] = ()) -> None:
        self._tokens: Tokens = np.empty(256, dtype=np.int32)
        self.length = 0
        self._before = 0
        self.extend(source)
        self._before, self.length = len(source), 0

    @property
    def tokens(self) -> Tokens:
        """Tokens of the source, then of the text."""
        return self._tokens[: self._before + self.length]

    def extend(self, tokens: Sequence[int]) -> None:
        start = self._before + self.length
        if start + len(tokens) > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens), np.asarray(tokens, np.int32)])
        self._tokens[start : start + len(tokens)] = tokens
        self.length += len(tokens)
