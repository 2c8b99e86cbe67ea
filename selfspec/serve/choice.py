"""One answer as it grows: tokens to text, up to a stop string, and why it ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import regex
from transformers import PreTrainedTokenizerBase

from selfspec.decode.text_stream import TextStream
from selfspec.serve.chat.call_reader import CallableTools, CallDelta, Said, ToolCall
from selfspec.serve.chat.thoughts import Parted, ThoughtReader, Thoughts
from selfspec.serve.events import Committed, Finished, TokenLogprobs

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Piece:
    """Holds what is new of an answer: certain text before any stop string, and committed tokens where asked for."""

    text: str
    scored: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    calls: tuple[CallDelta, ...] = ()
    thought: str = ""


@dataclass(frozen=True)
class Counts:
    """Tokens of an answer, drafted and accepted ones, and those of its prompt that a kept cache held.

    Of the draft tokens out of its prediction, `predicted` were accepted and `mispredicted` rejected. Once it has ended,
    `thought` are the tokens of its thoughts, as the tokenizer cuts them.
    """

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    cached: int = 0
    predicted: int = 0
    mispredicted: int = 0
    thought: int = 0


class Choice:
    """An answer that grows, behind the tokens of a prompt, up to any of the stop strings.

    Its `thoughts` are parted from its text, and calls of `tools` found in that. Special tokens are left out of its
    text, except those that these are written with. What comes after a stop string is not counted.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stops: Sequence[str],
        tools: CallableTools | None = None,
        thoughts: Thoughts | None = None,
    ) -> None:
        shown = frozenset(tools.shown if tools else ()) | (thoughts.shown if thoughts else frozenset())
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, prompt, special=bool(shown))
        self._hidden = frozenset(tokenizer.all_special_ids) - shown if shown else frozenset()
        self._stops = StopStrings(stops)
        self._calls = tools.reader() if tools else None
        self._thoughts = ThoughtReader(thoughts) if thoughts else None
        # When its first tokens came, in nanoseconds of `time.monotonic_ns`.
        self.begun: int | None = None
        self.text = self.thought = ""
        self.calls: list[ToolCall] = []
        self.scored: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.counts = Counts()

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it; None: none did."""
        return self._stops.string

    def take(self, committed: Committed) -> Piece:
        """Take what a round committed."""
        self.begun = self.begun or time.monotonic_ns()
        text, count = "", 0
        for token in committed.tokens:
            count += 1
            if token not in self._hidden:
                text += self._stops.push(self._stream.push([token]))
            # The answer would end here if its text, as it stands, has a stop string in it.
            if not self._stops.found and self._stops.ends(self._stream.whole_characters):
                text += self._stops.push(self._stream.finish())
            if self._stops.found:
                break
        now, scored = self.counts, (committed.logprobs or ())[:count]
        self.counts = Counts(
            now.tokens + count,
            now.drafted + committed.drafted,
            now.accepted + min(committed.accepted, count),
            committed.cached,
            min(committed.predicted, now.tokens + count),
            committed.mispredicted,
        )
        self.scored += scored
        return self._piece(text, "stop" if self._stops.found else None, scored)

    def end(self, finished: Finished) -> Piece:
        """Take the end of a row that no error ended."""
        text = self._stops.push(self._stream.finish()) + self._stops.finish()
        return self._piece(text, "length" if finished.reason == "length" and not self._stops.found else "stop")

    def _piece(self, text: str, reason: FinishReason | None, scored: tuple[TokenLogprobs, ...] = ()) -> Piece:
        ended = reason is not None
        thought, text = Parted("", text) if self._thoughts is None else self._thoughts.push(text, ended)
        said = Said(text, ()) if self._calls is None else self._calls.push(text, ended)
        self.thought += thought
        self.text += said.text
        self.calls += [each.call for each in said.calls if each.begins]
        if ended and self.thought:
            tokens = self._tokenizer(self.thought, add_special_tokens=False).input_ids
            self.counts = replace(self.counts, thought=len(tokens))
        self.finish_reason = "tool_calls" if reason == "stop" and self.calls else reason
        return Piece(said.text, scored, self.finish_reason, said.calls, thought)


class StopStrings:
    """Lets text through up to the first stop string, `string`; holds back what may become one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._any = regex.compile("|".join(map(regex.escape, strings)) or "(?!)")
        self._held = ""
        self.string: str | None = None

    @property
    def found(self) -> bool:
        """True once a stop string came."""
        return self.string is not None

    def push(self, text: str) -> str:
        """Take text; return what is certainly before any stop string."""
        if self.found:
            return ""
        self._held += text
        found = self._any.search(self._held)
        self.string = None if found is None else found[0]
        found = found or self._any.search(self._held, partial=True)
        return self._give(len(self._held) if found is None else found.start())

    def ends(self, text: str) -> bool:
        """Return whether a stop string would be found if this text came next."""
        return bool(text) and self._any.search(self._held + text) is not None

    def finish(self) -> str:
        """Return what was held back, when no more text comes."""
        return "" if self.found else self._give(len(self._held))

    def _give(self, length: int) -> str:
        given, self._held = self._held[:length], self._held[length:]
        return given
