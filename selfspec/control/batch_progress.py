"""How far drafts take a batch, whose end is that of its slowest row."""

from __future__ import annotations

from collections.abc import Sequence


class BatchProgress:
    """How far drafts take a batch, whose end is that of its slowest row.

    Rows may be alike, and the slowest of a few rounds catch up; or one may loop and another not, and it falls behind
    for good. So what each row has gained is drawn towards the mean of all, the less the more rounds there have been.
    """

    _PRIOR = 8.0  # rounds

    def __init__(self) -> None:
        self._gained: list[int] = []
        self._rounds = 0

    def after(self, tokens: Sequence[int | None]) -> float:
        """By how many tokens the batch is further after a round with a draft. Others take all rows equally far.

        Args:
            tokens: that each row gained; None for a row that had ended. At least one had not.
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
