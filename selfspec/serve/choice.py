"""One answer as it grows: tokens to text, up to a stop string, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from selfspec.decode.rows.logprobs import TokenLogprobs
from selfspec.decode.text_stream import TextStream
from selfspec.serve.events import Committed, Finished
from selfspec.serve.stop_strings import StopStrings

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class ScoredToken:
    """A token and its log-probabilities."""

    token: int
    logprobs: TokenLogprobs


@dataclass(frozen=True)
class Piece:
    """What is new of an answer.

    Attributes:
        text: that is certain, and before any stop string.
        scored: tokens that were committed, where log-probabilities are asked for.
        finish_reason: set in the last piece.
    """

    text: str
    scored: tuple[ScoredToken, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Counts:
    """Tokens of an answer: all of them, draft tokens that were proposed for it, and how many of those it has."""

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


class Choice:
    """An answer.

    Args:
        tokenizer: the model's.
        prompt: the tokens before.
        stops: strings that end it.

    Attributes:
        text: so far.
        scored: tokens so far, where log-probabilities are asked for.
        finish_reason: None while it grows.
        counts: so far; what comes after a stop string is not counted.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer, prompt)
        self._stops = StopStrings(stops)
        self.text = ""
        self.scored: list[ScoredToken] = []
        self.finish_reason: FinishReason | None = None
        self.counts = Counts()

    def take(self, committed: Committed) -> Piece:
        """Take what a round committed."""
        text, count = "", 0
        for token in committed.tokens:
            count += 1
            text += self._stops.push(self._stream.push([token]))
            if self._stops.found:
                break
        now = self.counts
        self.counts = Counts(
            now.tokens + count, now.drafted + committed.drafted, now.accepted + min(committed.accepted, count)
        )
        scored = [
            ScoredToken(token, logprobs)
            for token, logprobs in zip(committed.tokens[:count], committed.logprobs or (), strict=False)
        ]
        return self._piece(text, scored, "stop" if self._stops.found else None)

    def end(self, finished: Finished) -> Piece:
        """Take the end, which no error was."""
        text = self._stops.push(self._stream.finish())
        text += self._stops.finish()
        return self._piece(text, [], "length" if finished.reason == "length" and not self._stops.found else "stop")

    def _piece(self, text: str, scored: Sequence[ScoredToken], reason: FinishReason | None) -> Piece:
        self.text += text
        self.scored += scored
        self.finish_reason = reason
        return Piece(text, tuple(scored), reason)
