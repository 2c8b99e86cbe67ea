"""The memory of the cache: what rows take, and how much storage they are given within a bound in bytes."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from selfspec.decode.row_decoder import CacheSizes


@dataclass(frozen=True)
class Storage:
    """Storage of the running batch: the rows that it holds, and the committed tokens that each of them may have."""

    rows: int
    tokens: int


@dataclass(frozen=True)
class CacheBudget:
    """How much the cache may take: `bound` in bytes, `most_rows` of the running batch.

    All rows of the running batch have as many slots as the longest needs; a row that is being read has its own.

    Attributes:
        margin: tokens by which rows must be able to grow before another one may be read: else it might have to give
            its cache back at once.
    """

    sizes: CacheSizes
    bound: int
    most_rows: int
    margin: int = 64

    def fits_alone(self, tokens: int) -> bool:
        """Whether a row may grow to this many tokens when no other runs."""
        return self.sizes.of(1, tokens) <= self.bound

    @property
    def longest(self) -> int:
        """The most tokens that a row may come to have; 0 where there is no room for a row."""
        spare = self.bound - self.sizes.row
        if self.sizes.slot == 0:
            # States take the same whatever they have read.
            return sys.maxsize if spare >= 0 else 0
        return spare // self.sizes.slot - self.sizes.slack

    def admits(self, rows: int, longest: int, tokens: int, remaining: int) -> bool:
        """Whether a row of this many tokens, which may grow by `remaining`, may be read and then join `rows` others.

        `longest` is the length of the longest that runs; 0 without any.
        """
        if rows == 0:
            return True
        together = max(longest, tokens) + min(remaining, self.margin)
        return self.sizes.of(rows + 1, together) + self.sizes.of(1, tokens) <= self.bound

    def storage(self, now: Storage, rows: int, longest: int, most: int, beside: int) -> Storage | None:
        """Choose storage for some rows, roomy where there is room; None: they do not fit.

        Args:
            now: what there is.
            rows: that it must hold.
            longest: tokens that one of them has.
            most: tokens that one of them may come to have.
            beside: bytes that other rows take.
        """
        many = now.rows if now.rows >= rows else min(2 * rows, self.most_rows)
        long = now.tokens if now.tokens >= longest else min(2 * longest, most)
        for choice in (Storage(many, long), Storage(rows, long), Storage(many, longest), Storage(rows, longest)):
            if self.sizes.of(choice.rows, choice.tokens) + beside <= self.bound:
                return choice
        return None
