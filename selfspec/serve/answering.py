"""A request's answers on the engine: all begun or none, pieces as they come, and none left behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import astuple, dataclass

from transformers import PreTrainedTokenizerBase

from selfspec.errors import SelfSpecError
from selfspec.serve.api_error import ApiError, api_error
from selfspec.serve.call_reader import CallableTools
from selfspec.serve.choice import Choice, Counts, Piece
from selfspec.serve.engine import Engine
from selfspec.serve.events import Committed, Event, Finished
from selfspec.serve.row_request import RowRequest
from selfspec.serve.ticket import Ticket


@dataclass(frozen=True)
class NewPiece:
    """What is new of one answer, and when its tokens came: seconds since the request's beginning."""

    index: int
    piece: Piece
    tokens: int
    seconds: float


class Answering:
    """Answers one request: a row of the engine for each answer, ended by any of the stop strings.

    All answers may take `most_seconds` together; they may call `tools`.

    Attributes:
        choices: the answers, so far.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[RowRequest],
        stops: Sequence[str],
        most_seconds: float,
        tools: CallableTools | None = None,
    ) -> None:
        self._engine = engine
        self._rows = rows
        self._begun = time.monotonic()
        self._until = self._begun + most_seconds
        self._most_seconds = most_seconds
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, float, Event]] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self._lock = threading.Lock()
        self._given_up = False
        reading = [
            (None, frozenset[int]()) if tools is None else (tools.reader(), frozenset(tools.shown)) for _ in rows
        ]
        self.choices = [Choice(tokenizer, row.input_ids, stops, *each) for row, each in zip(rows, reading, strict=True)]

    def submit(self) -> None:
        """Hand every row to the engine, or none. May be called from any thread.

        Raises:
            ApiError: the engine refuses one.
        """
        for index, row in enumerate(self._rows):
            try:
                ticket = self._engine.submit(row, self._listener(index))
            except SelfSpecError as error:
                self.cancel()
                raise api_error(error, "max_tokens") from error
            with self._lock:
                self._tickets.append(ticket)
                given_up = self._given_up
            if given_up:
                ticket.cancel()
                return

    def cancel(self) -> None:
        """End what still runs."""
        with self._lock:
            self._given_up = True
            tickets = list(self._tickets)
        for ticket in tickets:
            ticket.cancel()

    async def pieces(self) -> AsyncIterator[NewPiece]:
        """What is new, as it comes, until every answer has ended.

        Raises:
            ApiError: an answer failed, or the time is over.
        """
        growing = set(range(len(self.choices)))
        while growing:
            try:
                async with asyncio.timeout(self._until - time.monotonic()):
                    index, seconds, event = await self._events.get()
            except TimeoutError:
                raise ApiError(
                    408,
                    f"the answer is not complete after {self._most_seconds:g} s, the most that a request may take; ask "
                    "for fewer tokens, or try again when fewer requests run",
                    None,
                    "request_timeout",
                ) from None
            if index not in growing:
                continue
            if isinstance(event, Finished) and event.error is not None:
                raise api_error(event.error) from event.error
            choice, before = self.choices[index], self.choices[index].counts.tokens
            piece = choice.take(event) if isinstance(event, Committed) else choice.end(event)
            if piece.finish_reason is not None:
                growing.remove(index)
                if isinstance(event, Committed):
                    self._tickets[index].cancel()
            yield NewPiece(index, piece, choice.counts.tokens - before, seconds)

    @property
    def counts(self) -> Counts:
        """Tokens of all answers together."""
        every = [choice.counts for choice in self.choices]
        return Counts(*(sum(values) for values in zip(*map(astuple, every), strict=True)))

    def _listener(self, index: int) -> Callable[[Event], None]:
        def listen(event: Event) -> None:
            seconds = time.monotonic() - self._begun
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, seconds, event))

        return listen
