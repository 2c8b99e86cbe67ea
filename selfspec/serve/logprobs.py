"""Log-probabilities of committed tokens, by raw logits, kept of each round until its tokens are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from selfspec.decode.output import ScoreRecords


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities, by raw logits, of a committed token and of the `top` likeliest at its place, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class LogprobRecord:
    """Keeps the log-probabilities of a round until its tokens are known, and reports the `top` likeliest."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._places: list[Tensor] = []

    def keep(self, logits: Tensor) -> None:
        """Keep the logits of the next places, `[places, vocab]`."""
        self._places += logits.float().log_softmax(-1).unbind()

    def take(self, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """Return the log-probabilities at the places of the committed tokens, and drop what was kept."""
        places, self._places = self._places[: len(tokens)], []
        found = []
        for place, token in zip(places, tokens, strict=True):
            best = place.topk(min(self._top, len(place)))
            top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            found.append(TokenLogprobs(float(place[token]), top))
        return tuple(found)


@dataclass(frozen=True)
class RowRecords(ScoreRecords):
    """Records of a row's committed tokens, with log-probabilities where `logprobs` are asked for."""

    logprobs: LogprobRecord | None = None

    def keep(
        self, scores: Tensor, logits: Tensor, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> tuple[Tensor, ...] | None:
        if self.logprobs is not None:
            self.logprobs.keep(logits[0, : counts[0]])
        return super().keep(scores, logits, rows, starts, counts)
