"""What the engine reports: of each row what rounds committed and how it ended, by its ticket; of itself its counts."""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from selfspec.errors import SelfSpecError

Reason = Literal["stop", "length", "cancelled", "error"]
"""Why a row ended: at an end-of-sequence token or a stopping criterion, at its longest, by its caller, by an error."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities, by raw logits, of a committed token and of the `top` likeliest at its place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Committed:
    """What a round committed: tokens are final.

    Attributes:
        tokens: at least one, an end-of-sequence token included.
        logprobs: of each; None where the request asks for none.
        drafted: draft tokens that were proposed to the row in this round.
        accepted: how many of them are among `tokens`.
        cached: tokens of the prompt that were not read, because a kept cache held them.
        predicted: draft tokens out of the request's prediction that were accepted so far.
        mispredicted: those that were rejected so far.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    drafted: int
    accepted: int
    cached: int = 0
    predicted: int = 0
    mispredicted: int = 0


@dataclass(frozen=True)
class Finished:
    """The last event of a row, with the counts of all of it; `error` is None where nothing went wrong."""

    reason: Reason
    error: SelfSpecError | None
    prompt_tokens: int
    completion_tokens: int
    drafted: int
    accepted: int


Event = Committed | Finished


class Shown(NamedTuple):
    """A metric that shows a count: its kind and name, and what it is."""

    kind: Literal["gauge", "counter"]
    name: str
    words: str


@dataclass
class EngineStats:
    """Counts of an engine at one moment, and how metrics show them; `finished` has rows by `Finished.reason`."""

    running: int = 0
    prefilling: int = 0
    waiting: Annotated[int, Shown("gauge", "vllm:num_requests_waiting", "Requests that wait for room.")] = 0
    cache_bytes: Annotated[int, Shown("gauge", "selfspec:cache_bytes", "Bytes of keys, values and states.")] = 0
    kept_bytes: Annotated[int, Shown("gauge", "selfspec:kept_cache_bytes", "Bytes of the caches of ended rows.")] = 0
    cache_bound: Annotated[int, Shown("gauge", "selfspec:cache_bound_bytes", "The most of them that there may be.")] = 0
    prompt_tokens: Annotated[int, Shown("counter", "vllm:prompt_tokens", "Tokens of prompts that were read.")] = 0
    asked_tokens: Annotated[int, Shown("counter", "vllm:prefix_cache_queries", "Tokens of texts to be read.")] = 0
    cached_tokens: Annotated[int, Shown("counter", "vllm:prefix_cache_hits", "Those that kept caches held.")] = 0
    committed: Annotated[int, Shown("counter", "vllm:generation_tokens", "Tokens that were committed.")] = 0
    preemptions: Annotated[int, Shown("counter", "vllm:num_preemptions", "Rows that were to be read again.")] = 0
    drafted: Annotated[int, Shown("counter", "vllm:spec_decode_num_draft_tokens", "Tokens that were proposed.")] = 0
    accepted: Annotated[int, Shown("counter", "vllm:spec_decode_num_accepted_tokens", "Those that were accepted.")] = 0
    rounds: Annotated[int, Shown("counter", "selfspec:rounds", "Rounds of the running batch.")] = 0
    plain_rounds: Annotated[int, Shown("counter", "selfspec:plain_rounds", "Rounds without a draft.")] = 0
    finished: Counter[str] = field(default_factory=Counter)


class Ticket:
    """A request that was submitted. Every method may be called from any thread.

    Args:
        on_event: is called with each event, on the engine's thread: it must return at once and not raise, as
            `lambda event: loop.call_soon_threadsafe(queue.put_nowait, event)` does. None: `events` has them.

    Attributes:
        cancelled: True once `cancel` was called.
        finished: the last event; None before the row has ended.
    """

    def __init__(self, on_event: Callable[[Event], object] | None = None) -> None:
        self._on_event = on_event
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.cancelled = False
        self.finished: Finished | None = None

    def cancel(self) -> None:
        """End the row before its next round. It still gets its last event; one that has ended is left as it is."""
        self.cancelled = True

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """Wait for the events, one by one, up to the last; `timeout` seconds for each, None for any time.

        Raises:
            TimeoutError: nothing came in that time. The row goes on; iterate again, or cancel it.
            RuntimeError: events go to `on_event`.
        """
        if self._on_event is not None:
            raise RuntimeError("events of this ticket go to on_event; submit without it to iterate over them")
        event: Event | None = None
        while not isinstance(event, Finished):
            try:
                event = self._events.get(timeout=timeout)
            except queue.Empty:
                raise TimeoutError(f"no event within {timeout} s") from None
            yield event

    def tokens(self, timeout: float | None = None) -> list[int]:
        """Wait for the end, `timeout` seconds in all or any time, and return what was committed.

        Raises:
            TimeoutError: it did not end in that time.
            SelfSpecError: the row ended by an error.
        """
        until = None if timeout is None else time.monotonic() + timeout
        tokens: list[int] = []
        while True:
            event = next(self.events(None if until is None else max(until - time.monotonic(), 0.0)))
            if not isinstance(event, Finished):
                tokens += event.tokens
            elif event.error is not None:
                raise event.error
            else:
                return tokens

    def deliver(self, event: Event) -> None:
        """Hand an event to the caller. The engine calls this."""
        if isinstance(event, Finished):
            self.finished = event
        (self._on_event or self._events.put)(event)
