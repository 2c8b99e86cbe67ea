"""Drafting without a model: the tokens that followed when the text last ended as it does now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.draft.declaration import drafter
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import Drafter, FreeProposer
from selfspec.draft.rows_apart import chains
from selfspec.draft.rows_view import RowsView
from selfspec.draft.text_places import OwnText, following, last_match
from selfspec.errors import DraftConfigError

_LONGEST = 64


@drafter("lookup", help="copies from the text so far")
@dataclass(frozen=True)
class PromptLookup(Drafter):
    """Copies from prompt and output: prompt look-up decoding (Saxena, 2023; LLMA, Yang et al., 2023).

    The draft is deterministic, so q is one-hot at its tokens. A row without a match gets its own last token as filler;
    any guess keeps the output exact.

    Attributes:
        shortest: tokens of the shortest match that counts, at least 1.
        longest: the most tokens of a match that count, at most 64. The latest of the longest matches is copied.
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
        return LookUpProposer(self.shortest, self.longest, [rows.source(row) for row in range(rows.size)])

    @classmethod
    def variants(cls, depth: int) -> Sequence[Drafter]:
        return (cls(),)


class LookUpProposer(FreeProposer):
    """Copies from each row's own text and its source; `PromptLookup` sets the match lengths."""

    def __init__(self, shortest: int, longest: int, sources: Sequence[Sequence[int]]) -> None:
        self._shortest, self._longest = shortest, longest
        self._texts = [OwnText(source) for source in sources]

    def look_up(self, rows: RowsView, budget: Budget) -> Draft:
        """Propose a chain; none if no unfinished row has a match, or too few rows have one for it to pay."""
        pacing = rows.pacing
        found: list[list[int]] = []
        # Match lengths of the pacing rows: in one generation, progress of other rows does not end the batch sooner.
        behind: list[int] = []
        for row in rows.running:
            text = self._texts[row]
            text.extend(rows.text(row, text.length))
            match = last_match(text.tokens, self._shortest, self._longest) if row in rows.unfinished else None
            if row in pacing:
                behind.append(0 if match is None else match.length)
            found.append([] if match is None else following(text.tokens, match, budget.depth))
        if not any(found):
            return rows.no_draft()
        share = sum(match > 0 for match in behind) / len(behind)
        most = min(budget.depth, rows.controller.look_up_length(share))
        # The row with the shortest match limits the batch.
        least = max(min(behind), self._shortest)
        return chains(rows, [row[:most] for row in found], match_length=least)

    def join(self, other: LookUpProposer) -> None:
        self._texts.extend(other._texts)

    def select(self, rows: Sequence[int]) -> None:
        self._texts[:] = [self._texts[row] for row in rows]
