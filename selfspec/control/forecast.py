"""Predicted speed-ups: by acceptance rate, and the best that the costs of a batch allow."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.control.costs import Costs

# The speed-up that a draft must promise on the prompt to be tried at once.
_WORTH_TRYING = 1.02
# Acceptance rate of a good draft, and the length beyond which it gains less than a billionth of a token.
_GOOD = 0.85
_LONG_DRAFT = 128


@dataclass(frozen=True)
class Forecast:
    """Holds the best predicted speed-up of a draft over plain decoding, and its draft length."""

    draft_length: int
    speedup: float


def speedup(alpha: float, draft_length: int, costs: Costs) -> float:
    """Predict (1 - alpha^(gamma+1)) / ((1 - alpha) (gamma c + V(gamma+1) + o)), after Leviathan et al. (2023)."""
    return expected_tokens(alpha, draft_length) / costs.of_round(draft_length, draft_length)


def expected_tokens(alpha: float, draft_length: int) -> float:
    """Return the tokens that a round commits on average, if every draft token has acceptance rate `alpha`."""
    return sum(alpha**accepted for accepted in range(draft_length + 1))


def forecast(alpha: float, costs: Costs, longest: int = 8) -> Forecast:
    """Find the draft length up to `longest` with the highest predicted speed-up."""
    best = max(range(1, longest + 1), key=lambda length: speedup(alpha, length, costs))
    return Forecast(best, speedup(alpha, best, costs))


class Prospects:
    """Predicts what drafts of at most `longest` tokens may gain or lose by the costs of a batch.

    Attributes:
        of_model: plain steps that the shortest round loses if nothing is accepted; 0 if a good draft would pay.
        of_look_up: the same for look-ups.
    """

    def __init__(self, costs: Costs, longest: int) -> None:
        self._costs = costs
        self._longest = longest
        self._lengths = range(1, min(longest, _LONG_DRAFT) + 1)
        self.of_model, self.of_look_up = self._risk(steps=1), self._risk(steps=0)

    def pays(self, chance: float) -> bool:
        """Return whether a draft of the model with this acceptance rate gains."""
        return any(self._speed(1, length, chance=chance) > _WORTH_TRYING for length in self._lengths)

    def look_up_length(self, share: float) -> int:
        """Return how many tokens to look up if a share of the slowest rows has a match; 0: look-ups would not pay.

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
        """Return the mean tokens of a row per plain step."""
        rows, cost = self._costs.rows, self._costs.of_round(steps * length, length)
        out_of_step = self._costs.out_of_step if rows > 1 else 1.0
        apart = (1 + share * (expected_tokens(chance, length) - 1)) / (cost * out_of_step)
        # In lockstep only tokens accepted in every row count.
        together = expected_tokens(chance**rows if share == 1 else 0.0, length) / cost
        return max(apart, together)
