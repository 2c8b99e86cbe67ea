"""Clients that send too much or too slowly, or do not read what they are sent."""

from __future__ import annotations

import asyncio
import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfspec.serve.api_error import ApiError
from selfspec.serve.server_limits import ServerLimits


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
