"""How far drafts advance a batch, which ends when its slowest row ends."""

from __future__ import annotations

from collections.abc import Sequence


class BatchProgress:
    """How far drafts advance a batch, which ends when its slowest row ends.

    Rows may be alike, and the slowest of a few rounds catches up; or one row loops and another does not and falls
    behind for good. So the progress of the slowest row is shrunk towards the mean, less and less with more rounds.
    """

    _PRIOR = 8.0  # rounds

    def __init__(self) -> None:
        self._gained: list[int] = []
        self._rounds = 0

    def after(self, tokens: Sequence[int | None]) -> float:
        """Count a round with a draft; returns the tokens by which the batch has advanced.

        Args:
            tokens: that each row gained; None for a finished row. At least one row is unfinished.
        """
        if len(tokens) != len(self._gained):
            self._gained, self._rounds = [0] * len(tokens), 0
        going = [index for index, count in enumerate(tokens) if count is not None]
        before = self._place(going)
        self._rounds += 1
        self._gained = [gained + (count or 0) for gained, count in zip(self._gained, tokens, strict=True)]
        return self._place(going) - before

    def _place(self, going: Sequence[int]) -> float:
        gained = [self._gained[index] for index in going]
        mean = sum(gained) / len(gained)
        return mean - (mean - min(gained)) * self._rounds / (self._rounds + self._PRIOR)
