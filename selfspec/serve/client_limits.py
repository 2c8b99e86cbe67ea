"""What one client may take, so that there is something left for the others: sizes, numbers and times."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfspec.errors import UnsupportedOptionError
from selfspec.serve.api_error import RETRY_AFTER, ApiError


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of requests.

    Attributes:
        body_bytes: of a request's body.
        new_tokens: of an answer; None: what the context has room for.
        answers: of one request: prompts times `n`.
        request_seconds: until a request is answered to its end.
        client_seconds: in which a client has to begin a request and send its headers, then its body, and to take what
            it is sent.
        connections: open at once, and requests below /v1 that are answered at once.
        stored_bytes: of conversations that requests may go on from by the id of a response.
    """

    body_bytes: int = 4 * 2**20
    new_tokens: int | None = None
    answers: int = 128
    request_seconds: float = 600.0
    client_seconds: float = 20.0
    connections: int = 1000
    stored_bytes: int = 16 * 2**20

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not value > 0:
                raise UnsupportedOptionError(f"{each.name} must be above 0, got {value}")


# What needs the key, and is counted: whoever looks after the server is answered however many others there are.
_KEPT = ("/v1", "/api/")


class ClientPace:
    """Reads the whole body before anything else runs, within a size and a time; gives up on who does not read.

    Without one of `api_keys`, where there are any, nothing is read of what needs it.
    """

    def __init__(self, app: ASGIApp, limits: ServerLimits, api_keys: Sequence[str]) -> None:
        self._app = app
        self._limits = limits
        self._api_keys = [key.encode() for key in api_keys]
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        counted = scope["path"].startswith(_KEPT)
        self._open += counted
        try:
            if counted and self._open > self._limits.connections:
                said = f"{self._limits.connections} requests are being answered, the most at once; try again later"
                raise ApiError(503, said, None, "too_many_connections", {"retry-after": str(RETRY_AFTER)})
            headers = Headers(scope=scope)
            self._check_key(scope["path"], headers)
            body = await self._body(headers, receive)
            if body is not None:
                await self._paced(body, scope, receive, send)
        except ApiError as error:
            # What the client still sends is not read.
            error.headers["connection"] = "close"
            await error.response(scope["path"])(scope, receive, send)
        finally:
            self._open -= counted

    async def _paced(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        gave_up = False

        async def next_message() -> Message:
            return unread.pop() if unread else await receive()

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

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._api_keys or not path.startswith(_KEPT):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            # As Anthropic's clients send it.
            given = headers.get("x-api-key", "")
        # All are compared, each as a whole: the time that it takes says nothing of any.
        if not sum(hmac.compare_digest(given.strip().encode(), key) for key in self._api_keys):
            said = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
            raise ApiError(401, said, None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """Read the body; None where the client left."""
        if "content-length" in headers and "transfer-encoding" in headers:
            raise ApiError(400, "content-length and transfer-encoding are both given; send one of them")
        most = self._limits.body_bytes
        body, size = bytearray(), int(headers.get("content-length", "0"))
        try:
            async with asyncio.timeout(self._limits.client_seconds):
                while max(size, len(body)) <= most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if not message.get("more_body", False) and len(body) <= most:
                        return bytes(body)
        except TimeoutError:
            said = f"the body did not come within {self._limits.client_seconds:g} s"
            raise ApiError(408, said, None, "slow_client") from None
        raise ApiError(413, f"the body is larger than {most} bytes, the most that is read", None, "too_large")


class PacedServer(uvicorn.Server):
    """Closes connections whose headers do not come in time, and the idlest where there are too many.

    Uvicorn bounds the size of headers and the pause between two requests, but waits for the rest of a header as long as
    the client wants. Where it has a bound of connections, it refuses every request beyond it, idle ones counted.
    """

    def __init__(self, config: uvicorn.Config, limits: ServerLimits) -> None:
        super().__init__(config)
        self._limits = limits
        # When each, after the same request, was first seen to wait for the next one: the earliest first.
        self._idle: dict[tuple[Any, Any], float] = {}

    async def on_tick(self, counter: int) -> bool:
        """Look at all connections, ten times a second."""
        every: list[Any] = [*self.server_state.connections]
        now = time.monotonic()
        idle = {(each, each.cycle) for each in every if _waits(each)}
        kept = {each: since for each, since in self._idle.items() if each in idle}
        self._idle = kept | dict.fromkeys(idle - kept.keys(), now)
        surplus = len(every) - self._limits.connections
        for place, ((connection, _), since) in enumerate(self._idle.items()):
            if place < surplus or now - since > self._limits.client_seconds:
                connection.transport.abort()
        return await super().on_tick(counter)


def _waits(connection: Any) -> bool:
    """Return whether a connection reads and answers no request."""
    cycle = connection.cycle
    return connection.conn.their_state is h11.IDLE and (cycle is None or cycle.response_complete)
