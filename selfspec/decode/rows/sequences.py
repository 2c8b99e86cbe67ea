"""The texts of rows with prompts of their own, as drafters and the loop read them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from selfspec.decode.sequences import Sequences


class JoinedSequences(Sequences):
    """Several texts, each a batch of one: all of them run. What processors see is each row's own.

    Args:
        parts: of each row; committed tokens are shared with these.
    """

    def __init__(self, parts: Sequence[Sequences]) -> None:
        self._parts = list(parts)
        self.committed = [part.committed[0] for part in parts]
        self.unfinished = set(range(len(parts)))
        self.running = list(range(len(parts)))
        self.text_ends = {}
        # No column of padding: rows are never seen side by side.
        self.width, self.pad = 0, 0

    @property
    def are_text(self) -> bool:
        return all(part.are_text for part in self._parts)

    def length(self, row: int) -> int:
        return self._parts[row].length(0)

    def tokens_from(self, row: int, start: int) -> list[int]:
        return self._parts[row].tokens_from(0, start)

    def text_length(self, row: int) -> int:
        return self._parts[row].text_length(0)

    def text_from(self, row: int, start: int) -> list[int]:
        return self._parts[row].text_from(0, start)

    def followed_by(self, runs: Sequence[Sequence[int]]) -> Tensor:
        raise NotImplementedError("rows that join have no batch of ids in common; ask each row's own sequences")
