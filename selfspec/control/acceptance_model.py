"""How often tokens of each confidence are accepted, learned as a generation goes."""

from __future__ import annotations

import math


class AcceptanceModel:
    """How often tokens of each confidence are accepted.

    Begins with what a fair draft shows. That is more often than it is confident where it is unsure: the target is then
    unsure as well, and two flat distributions overlap. A draft that is accepted more or less often than a fair one of
    the same confidences shifts the chances of all confidences, those not yet seen among them, by the same log-odds.
    What was seen of a confidence itself counts beside that.
    """

    _BINS = 10
    _PRIOR = 4.0  # tokens
    _UNSURE, _SURE = 0.35, 0.95

    def __init__(self) -> None:
        width = (self._SURE - self._UNSURE) / self._BINS
        self._fair = [self._UNSURE + (index + 0.5) * width for index in range(self._BINS)]
        self._accepted = [0.0] * self._BINS
        self._judged = [0.0] * self._BINS
        self._shift = 0.0

    @property
    def mean(self) -> float:
        """The chance of a token whose confidence is not known."""
        return drawn_to_fair(sum(self._accepted), sum(self._judged))

    def chance(self, confidence: float) -> float:
        """The chance that a token is accepted which the draft is so confident of."""
        bin_ = self._bin(confidence)
        shifted = 1 / (1 + math.exp(-_log_odds(self._fair[bin_]) - self._shift))
        return (self._PRIOR * shifted + self._accepted[bin_]) / (self._PRIOR + self._judged[bin_])

    def count(self, confidence: float, accepted: float, weight: float = 1.0) -> None:
        """Take in a token that was judged: whether it was accepted, or the chance that it would be."""
        bin_ = self._bin(confidence)
        self._judged[bin_] += weight
        self._accepted[bin_] += weight * accepted
        of_fair = sum(fair * judged for fair, judged in zip(self._fair, self._judged, strict=True))
        self._shift = _log_odds(self.mean) - _log_odds(drawn_to_fair(of_fair, sum(self._judged)))

    def _bin(self, confidence: float) -> int:
        return min(int(confidence * self._BINS), self._BINS - 1)


def drawn_to_fair(accepted: float, judged: float) -> float:
    """The rate at which tokens are accepted, drawn towards a fair draft's as by two tokens more."""
    return (accepted + 2 * 0.6) / (judged + 2)


def _log_odds(chance: float) -> float:
    return math.log(chance / (1 - chance))
