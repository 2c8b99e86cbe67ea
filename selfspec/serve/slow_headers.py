"""Uvicorn's HTTP protocol with a bound on the time in which the headers of a request have to come."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedHeaders(H11Protocol):
    """Closes connections whose request line and headers do not come in time.

    Uvicorn bounds their size and the pause between two requests, but waits for the rest of a header as long as the
    client wants.
    """

    seconds = 20.0
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._waiting = self.loop.call_later(self.seconds, self._give_up)

    def data_received(self, data: bytes) -> None:
        """Read on; a request that is complete ends the wait, one that begins starts it."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._end_wait()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(self.seconds, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._end_wait()
        super().connection_lost(exc)

    def _end_wait(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        self._waiting = None
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
            self.transport.abort()


def bounded_headers(seconds: float) -> type[BoundedHeaders]:
    """The protocol with a bound of its own."""
    return type("BoundedHeaders", (BoundedHeaders,), {"seconds": seconds})
