"""Log-probabilities of one row's committed tokens, by the target's own logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one committed token's place, by the model's own logits, before processors and filters.

    Attributes:
        logprob: of the token.
        top: the likeliest tokens and theirs, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class LogprobRecord:
    """Keeps what a round's places say until their tokens are known.

    Args:
        top: how many of the likeliest tokens are reported.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._places: list[Tensor] = []

    def keep(self, logits: Tensor) -> None:
        """Keep the logits of the next places, `[places, vocab]`."""
        self._places += logits.float().log_softmax(-1).unbind()

    def take(self, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """Return what was kept at the places of the tokens that the round committed, and forget it."""
        places, self._places = self._places[: len(tokens)], []
        found = []
        for place, token in zip(places, tokens, strict=True):
            best = place.topk(min(self._top, len(place)))
            top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            found.append(TokenLogprobs(float(place[token]), top))
        return tuple(found)
