"""Drafting without any pass of the model: what followed the last time that the text ended as it does now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from selfspec.draft.draft import Budget, Draft
from selfspec.draft.draft_state import DraftState
from selfspec.draft.drafter import Drafter
from selfspec.draft.suffix_index import SuffixIndex
from selfspec.errors import DraftConfigError

if TYPE_CHECKING:
    from selfspec.decode.batch import Batch

# The index of a text takes memory in proportion to the square of this.
_LONGEST = 64


@dataclass(frozen=True)
class PromptLookup(Drafter):
    """Prompt look-up decoding (Saxena, 2023; LLMA, Yang et al., 2023): copies from prompt and output.

    The draft is deterministic, so q is one-hot at its tokens. A row whose text ends as nowhere before gets its own last
    token for a draft, which is as exact as any other guess.

    Attributes:
        shortest: tokens of the shortest match that counts, at least 1.
        longest: tokens up to which matches are indexed, at most 64; among places the one with the longest match is
            taken, and the latest of these.
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

    def check(self, depth: int) -> None:
        return

    def begin(self, batch: Batch) -> LookUpState:
        return LookUpState([SuffixIndex(self.shortest, self.longest) for _ in range(batch.size)])

    def propose(self, batch: Batch, budget: Budget) -> Draft:
        found = self.look_up(batch, budget)
        return found if batch.controller.tries(found.match_length) else batch.no_draft()

    def look_up(self, batch: Batch, budget: Budget) -> Draft:
        """Propose a chain; none where no unfinished row has a match, or too few rows for it to pay."""
        state = self.state(batch)
        assert isinstance(state, LookUpState)
        pacing = batch.pacing
        rows: list[list[int]] = []
        # Matches of the rows that matter: in one generation, what others gain does not end the batch sooner.
        behind: list[int] = []
        for row in batch.running:
            index = state.indexes[row]
            index.extend(batch.sequences.text_from(row, len(index)))
            match = index.find() if row in batch.unfinished else None
            if row in pacing:
                behind.append(0 if match is None else match.length)
            rows.append([] if match is None else list(index.after(match, budget.depth)))
        if not any(rows):
            return batch.no_draft()
        last = batch.last_tokens[:, 0].tolist()
        share = sum(match > 0 for match in behind) / len(behind)
        # What a batch can hope for is set by the row with least to go by.
        least = max(min(behind), self.shortest)
        most = min(budget.depth, batch.controller.look_up_length(share))
        if most == 0:
            return batch.no_draft()
        tokens = [row[:most] or [token] * most for row, token in zip(rows, last, strict=True)]
        lengths = tuple(most if row else 0 for row in rows)
        return Draft.chain(
            torch.tensor(tokens, device=batch.last_tokens.device), match_length=least, row_lengths=lengths
        )


@dataclass(frozen=True)
class LookUpState(DraftState):
    """Where suffixes of each row's text were, by the number of the row."""

    indexes: list[SuffixIndex]

    def join(self, other: DraftState | None) -> None:
        assert isinstance(other, LookUpState)
        self.indexes.extend(other.indexes)

    def keep(self, rows: Sequence[int]) -> None:
        self.indexes[:] = [self.indexes[row] for row in rows]
