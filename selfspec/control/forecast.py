"""The speed-up that the cost model predicts from an acceptance rate."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.control.costs import Costs


@dataclass(frozen=True)
class Forecast:
    """The best predicted speed-up of a draft.

    Attributes:
        draft_length: gamma of the highest speed-up.
        speedup: against plain decoding.
    """

    draft_length: int
    speedup: float


def speedup(alpha: float, draft_length: int, costs: Costs) -> float:
    """Predict (1 - alpha^(gamma+1)) / ((1 - alpha) (gamma c + V(gamma+1) + o)), after Leviathan et al. (2023).

    Args:
        alpha: acceptance rate, in 0..1.
        draft_length: gamma.
        costs: of a round.
    """
    tokens = sum(alpha**accepted for accepted in range(draft_length + 1))
    return tokens / costs.of_round(draft_length, draft_length)


def forecast(alpha: float, costs: Costs, longest: int = 8) -> Forecast:
    """Find the draft length up to `longest` with the highest predicted speed-up.

    Args:
        alpha: acceptance rate, in 0..1.
        costs: of a round.
        longest: the largest gamma to consider.
    """
    best = max(range(1, longest + 1), key=lambda length: speedup(alpha, length, costs))
    return Forecast(best, speedup(alpha, best, costs))
