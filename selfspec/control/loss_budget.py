"""Whether drafting may go on, by what it has lost."""

from __future__ import annotations

MAY_LOSE = 3.0
"""Plain steps that drafts may lose at any time."""

_PER_ROUND = 0.005  # plain steps more for each round of the generation


def may_lose(at_once: float, rounds: int) -> float:
    """What drafts may have lost after so many rounds, in plain steps.

    Args:
        at_once: what they may lose to begin with.
        rounds: of the generation so far.
    """
    return at_once + _PER_ROUND * rounds


class LossBudget:
    """Whether drafting may go on: while what it has lost, in plain steps, stays within what it may lose.

    That is a few steps to begin with, and half a hundredth of a step for each round since: so a draft is given time to
    show what it is worth, one that is worth nothing is tried again now and then, and all of it costs about a percent.
    """

    _TRIALS = 4
    _MEMORY = 0.9  # a round's weight beside the next one's

    def __init__(self) -> None:
        self._tokens = self._cost = 0.0
        self._lost = self.paid = 0.0
        self._rounds = self._asked = 0

    @property
    def rate(self) -> float:
        """Tokens per plain step that rounds with a draft have gained lately, were none dropped; 1 before the first."""
        return self._tokens / self._cost if self._cost else 1.0

    @property
    def is_new(self) -> bool:
        """Whether too few rounds have been seen to judge by."""
        return self._rounds < self._TRIALS

    def opens(self, at_once: float, at_risk: float) -> bool:
        """Whether the round that begins may draft. Asked once a round.

        Args:
            at_once: what it may lose to begin with.
            at_risk: what it may lose, of a draft that promises nothing: it has to be saved up first. Else 0.
        """
        self._asked += 1
        if at_risk > 0 and not self.gains:
            return self._lost + at_risk <= may_lose(0.0, self._asked)
        return self._lost <= may_lose(at_once, self._asked)

    @property
    def gains(self) -> bool:
        """Whether its drafts have gained at least what they cost, as far as this may be held against them."""
        return self._rounds > 0 and self._lost <= 0

    def count(self, committed: float, dropped: float, cost: float) -> None:
        """Take in a round with a draft: tokens of a row, and plain steps."""
        self._tokens = self._MEMORY * self._tokens + committed + dropped
        self._cost = self._MEMORY * self._cost + cost
        # What is dropped while a draft is tried out is the price of the trial. It would shut out the good ones of large
        # batches, where the worst row commits next to nothing, before they have shown that they are good.
        gained = committed + dropped if self.is_new else committed
        # Gains of long ago do not pay for losses without end.
        self._lost = max(self._lost + cost - gained, -MAY_LOSE)
        self.paid = max(self.paid + cost - committed, -MAY_LOSE)
        self._rounds += 1
