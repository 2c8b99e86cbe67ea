"""Where rows end that each have their own length, end tokens and criteria."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from selfspec.decode.rows.row import Row
from selfspec.decode.sequences import Sequences
from selfspec.decode.stopping import Stopping


class JoinedStopping(Stopping):
    """Asks each row's own.

    Args:
        rows: in the order in which tensors hold them.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__(max(row.stopping.max_new_tokens for row in rows))
        object.__setattr__(self, "_rows", tuple(rows))

    _rows: tuple[Row, ...]

    def shortened(self, sequences: Sequences, runs: Sequence[Sequence[int]]) -> list[list[int]]:
        return [row.stopping.shortened(row.sequences, [run])[0] for row, run in zip(self._rows, runs, strict=True)]

    def judged(
        self, sequences: Sequences, runs: Sequence[Sequence[int]], scores: tuple[Tensor, ...] | None
    ) -> list[int | None]:
        """As in `Stopping`. Where a row's criterion raises, the row notes it, and ends with nothing of its run."""
        ends: list[int | None] = []
        for row, run in zip(self._rows, runs, strict=True):
            try:
                ends += row.stopping.judged(row.sequences, [run], None)
            except Exception as error:
                row.error = error
                ends.append(0)
        return ends
