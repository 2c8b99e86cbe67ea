"""One answer as it grows: tokens to text, up to a stop string, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest
from typing import Literal

from transformers import PreTrainedTokenizerBase

from selfspec.decode.output import TokenLogprobs
from selfspec.decode.text_stream import TextStream
from selfspec.serve.call_reader import CallDelta, CallReader, Said, ToolCall
from selfspec.serve.events import Committed, Finished
from selfspec.serve.stop_strings import StopStrings

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class ScoredToken:
    """A token, its log-probabilities, and what it wrote of the answer's text, at an offset in it.

    The text is empty where the token is special, is behind the end, or is not the last of a character's.
    """

    token: int
    logprobs: TokenLogprobs
    text: str
    offset: int


@dataclass(frozen=True)
class Piece:
    """What is new of an answer.

    Attributes:
        text: that is certain, and before any stop string.
        scored: tokens whose text is now among it, where log-probabilities are asked for.
        finish_reason: set in the last piece.
        calls: what is new of calls of tools.
    """

    text: str
    scored: tuple[ScoredToken, ...] = ()
    finish_reason: FinishReason | None = None
    calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True)
class Counts:
    """Tokens of an answer: all of them, draft tokens that were proposed for it, and how many of those it has.

    And those of its prompt that were not read, because a cache held them.
    """

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    cached: int = 0


class Choice:
    """An answer that grows, behind the tokens of a prompt, up to any of the stop strings.

    A reader finds calls of tools in it. Special tokens are left out of its text, but for those that are `shown`.

    Attributes:
        text: so far.
        scored: tokens so far, where log-probabilities are asked for.
        calls: of tools, so far.
        finish_reason: None while it grows.
        counts: so far; what comes after a stop string is not counted.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stops: Sequence[str],
        reader: CallReader | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._stream = TextStream(tokenizer, prompt, special=bool(shown))
        self._hidden = frozenset(tokenizer.all_special_ids) - shown if shown else frozenset()
        self._stops = StopStrings(stops)
        self._reader = reader
        self._passed = 0
        # Tokens whose text is not certain, and those whose text may still be cut off by a stop string.
        self._unread: list[tuple[int, TokenLogprobs]] = []
        self._held: list[ScoredToken] = []
        self._read_to = 0
        self.text = ""
        self.calls: list[ToolCall] = []
        self.scored: list[ScoredToken] = []
        self.finish_reason: FinishReason | None = None
        self.counts = Counts()

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it; None: none did."""
        return self._stops.string

    def take(self, committed: Committed) -> Piece:
        """Take what a round committed."""
        text, count = "", 0
        for token, logprobs in zip_longest(committed.tokens, committed.logprobs or ()):
            count += 1
            if logprobs is not None:
                self._unread.append((token, logprobs))
            text += self._let_through([""] if token in self._hidden else self._stream.push_apart([token]))
            # The answer would end here if its text, as it stands, has a stop string in it.
            if not self._stops.found and self._stops.ends(self._stream.whole_characters):
                text += self._let_through(self._stream.finish_apart())
            if self._stops.found:
                break
        now = self.counts
        self.counts = Counts(
            now.tokens + count,
            now.drafted + committed.drafted,
            now.accepted + min(committed.accepted, count),
            committed.cached,
        )
        return self._piece(text, "stop" if self._stops.found else None)

    def end(self, finished: Finished) -> Piece:
        """Take the end, which no error was."""
        text = self._let_through(self._stream.finish_apart())
        text += self._stops.finish()
        return self._piece(text, "length" if finished.reason == "length" and not self._stops.found else "stop")

    def _let_through(self, texts: Sequence[str]) -> str:
        """What is certainly before any stop string, of the texts of the next tokens."""
        for text in texts:
            if self._unread:
                token, logprobs = self._unread.pop(0)
                self._held.append(ScoredToken(token, logprobs, text, self._read_to))
            self._read_to += len(text)
        return self._stops.push("".join(texts))

    def _piece(self, text: str, reason: FinishReason | None) -> Piece:
        self._passed += len(text)
        length = self._passed
        scored = list(takewhile(lambda each: reason or each.offset + len(each.text) <= length, self._held))
        del self._held[: len(scored)]
        if reason:
            scored = [
                replace(each, text=each.text[: max(length - each.offset, 0)], offset=min(each.offset, length))
                for each in scored
            ]
        said = Said(text, ()) if self._reader is None else self._reader.push(text, ended=reason is not None)
        self.text += said.text
        self.calls += [each.call for each in said.calls if each.begins]
        self.scored += scored
        self.finish_reason = "tool_calls" if reason == "stop" and self.calls else reason
        return Piece(said.text, tuple(scored), self.finish_reason, said.calls)
