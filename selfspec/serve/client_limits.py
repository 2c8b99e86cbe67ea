"""What one client may take, so that there is something left for the others: sizes, numbers and times."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, fields

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from selfspec.errors import UnsupportedOptionError
from selfspec.serve.api_error import ApiError


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of requests.

    Attributes:
        body_bytes: of a request's body.
        new_tokens: of an answer; None: what the context has room for.
        answers: of one request: prompts times `n`.
        request_seconds: until a request is answered to its end.
        client_seconds: in which a client has to send the headers of a request, then its body, and to take what it is
            sent.
        connections: open at once.
    """

    body_bytes: int = 4 * 2**20
    new_tokens: int | None = None
    answers: int = 128
    request_seconds: float = 600.0
    client_seconds: float = 20.0
    connections: int = 1000

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not value > 0:
                raise UnsupportedOptionError(f"{each.name} must be above 0, got {value}")


class ClientPace:
    """Reads the whole body before anything else runs, within a size and a time; and gives up on who does not read."""

    def __init__(self, app: ASGIApp, limits: ServerLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._body(scope, receive)
        except ApiError as error:
            await _refuse(error, send)
            return
        if body is None:
            return
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def next_message() -> Message:
            return unread.pop() if unread else await receive()

        gave_up = False

        async def paced(message: Message) -> None:
            nonlocal gave_up
            try:
                async with asyncio.timeout(self._limits.client_seconds):
                    await send(message)
            except TimeoutError:
                gave_up = True
                raise

        try:
            await self._app(scope, next_message, paced)
        except Exception:
            # The server closes the connection of an answer that is not complete.
            if not gave_up:
                raise

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None where the client left."""
        most = self._limits.body_bytes
        too_large = ApiError(413, f"the body is larger than {most} bytes, the most that is read", None, "too_large")
        stated = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if stated.isdigit() and int(stated) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.client_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not come within {self._limits.client_seconds:g} s", None, "slow_client"
            ) from None


async def _refuse(error: ApiError, send: Send) -> None:
    body = json.dumps(error.body).encode()
    # What the client still sends is not read.
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    start = {"type": "http.response.start", "status": error.status, "headers": [*headers, (b"connection", b"close")]}
    await send(start)
    await send({"type": "http.response.body", "body": body})


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
