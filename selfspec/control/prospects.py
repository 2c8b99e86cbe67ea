"""The best speed-up that the costs of a batch allow a draft."""

from __future__ import annotations

from selfspec.control.costs import Costs

# The speed-up that a draft must promise on the prompt to be tried at once.
_WORTH_TRYING = 1.02
# Acceptance rate of a good draft, and a length beyond which it gains less than a billionth of a token.
_GOOD = 0.85
_LONG_DRAFT = 128


class Prospects:
    """The best speed-up that the costs of a batch allow.

    Args:
        costs: of the batch.
        longest: the most tokens of a draft.

    Attributes:
        of_model: plain steps that the shortest round loses if nothing is accepted; 0 where a good draft would pay.
        of_look_up: the same for look-ups.
    """

    def __init__(self, costs: Costs, longest: int) -> None:
        self._costs = costs
        self._longest = longest
        self._lengths = range(1, min(longest, _LONG_DRAFT) + 1)
        self.of_model, self.of_look_up = self._risk(steps=1), self._risk(steps=0)

    def pays(self, chance: float) -> bool:
        """Whether a draft of the model with this acceptance rate gains."""
        return any(self._speed(1, length, chance=chance) > _WORTH_TRYING for length in self._lengths)

    def look_up_length(self, share: float) -> int:
        """Tokens to look up where a share of the slowest rows has a match; 0: look-ups would not pay for the batch.

        In a single row a look-up costs next to nothing; in a batch each token is one more in every row.
        """
        if self._costs.rows == 1:
            return self._longest
        best = max(self._lengths, key=lambda length: self._speed(0, length, share))
        return best if share == 1 or self._speed(0, best, share) > 1 else 0

    def _risk(self, steps: int) -> float:
        pays = any(self._speed(steps, length) > 1 for length in self._lengths)
        return 0.0 if pays else self._costs.of_round(steps, 1) - 1

    def _speed(self, steps: int, length: int, share: float = 1.0, chance: float = _GOOD) -> float:
        """Tokens of a row per plain step, on average."""
        rows, cost = self._costs.rows, self._costs.of_round(steps * length, length)
        apart = (1 + share * (_expected(chance, length) - 1)) / (cost * (self._costs.out_of_step if rows > 1 else 1.0))
        # In lockstep only tokens accepted in every row count.
        together = _expected(chance**rows if share == 1 else 0.0, length) / cost
        return max(apart, together)


def _expected(chance: float, length: int) -> float:
    """Tokens that a round commits on average if each draft token is accepted with the same chance."""
    return sum(chance**place for place in range(length + 1))
