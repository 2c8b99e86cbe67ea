"""Loss budgets: count gains and losses of drafts, and decide by them whether drafting may continue."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.draft.cascade import Gain

MAY_LOSE = 3.0
"""Plain steps that drafting may lose at once."""

_PER_ROUND = 0.005  # further plain steps for each round of the generation
# A rarely tried draft loses this many times what the formula says: its weights and programs have left the processor's
# caches, and its passes may not be recorded yet.
_SELDOM = 2.0


def may_lose(at_once: float, rounds: int) -> float:
    """Return the plain steps that drafting may lose within `rounds` rounds, `at_once` of them from the start."""
    return at_once + _PER_ROUND * rounds


class LossBudget(Gain):
    """Bounds what a source of drafts may lose, in plain steps.

    The budget is a few steps from the start and 0.005 further steps each round. So a draft has time to show its worth,
    a useless draft is tried again now and then, and the total cost is about one percent.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lost = self.paid = 0.0
        self._asked = 0

    def opens(self, at_once: float, at_risk: float) -> bool:
        """Return whether this round may draft, if `at_once` plain steps may be lost from the start. Call once a round.

        `at_risk` is the possible loss of a round of an unpromising draft, to be saved up first; 0 for a promising one.
        """
        self._asked += 1
        if at_risk > 0 and not self.gains:
            return _SELDOM * (self._lost + at_risk) <= may_lose(0.0, self._asked)
        return self._lost <= may_lose(at_once, self._asked)

    @property
    def gains(self) -> bool:
        """True if its drafts have gained at least what they cost; losses of the trial do not count."""
        return self.rounds > 0 and self._lost <= 0

    def count_dropped(self, committed: float, dropped: float, cost: float) -> None:
        """Count a round with a draft: committed and dropped tokens of a row, and the cost in plain steps."""
        # Dropped tokens are the price of a trial. Counted as losses, they would rule out good drafts of large batches,
        # whose slowest row commits almost nothing at first.
        gained = committed + dropped if self.is_new else committed
        # Old gains must not pay for endless losses.
        self._lost = max(self._lost + cost - gained, -MAY_LOSE)
        self.paid = max(self.paid + cost - committed, -MAY_LOSE)
        self.count(committed + dropped, cost)


class Progress:
    """Counts how far drafts advance rows that come and go: each row by the tokens that it gains."""

    def after(self, tokens: Sequence[int | None]) -> float:
        """Count a round with a draft; return the tokens by which rows have advanced, on average.

        `tokens` are those that each row gained; None for a finished row. At least one row is unfinished.
        """
        gained = [count for count in tokens if count is not None]
        return sum(gained) / len(gained)


class BatchProgress(Progress):
    """Counts how far drafts advance a batch, which ends when its slowest row ends.

    If rows are alike, a row that is slow for a few rounds catches up; if some rows loop and another does not, that one
    falls behind for good. So the progress of the slowest row is shrunk towards the mean, less with more rounds.
    """

    _PRIOR = 8.0  # rounds

    def __init__(self) -> None:
        self._gained: list[int] = []
        self._rounds = 0

    def after(self, tokens: Sequence[int | None]) -> float:
        """Count a round as `Progress.after` does; return the tokens by which the batch has advanced."""
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
