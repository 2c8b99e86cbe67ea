"""What is written of each request: one line of JSON, with its id, and no text of anybody unless that is asked for."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOGGER = logging.getLogger("selfspec.serve")
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_HEADER = b"x-request-id"


class JsonLines(logging.Formatter):
    """A record as one line of JSON: time, level, message, and the fields of `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def request_id(scope: Scope) -> str:
    """The id of a request, which its answer carries too."""
    found: str = scope["selfspec"]["request_id"]
    return found


def note(scope: Scope, **fields: Any) -> None:
    """Add fields to the line of a request."""
    scope["selfspec"].update(fields)


class RequestLog:
    """Gives every request an id, the client's own if it sends one, and writes a line when it has been answered."""

    def __init__(self, app: ASGIApp, responded: Callable[[int], None]) -> None:
        self._app = app
        self._responded = responded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == _HEADER), "")
        own = given if _ID.fullmatch(given) else uuid.uuid4().hex
        fields: dict[str, Any] = {"request_id": own}
        scope["selfspec"] = fields
        begun, status = time.monotonic(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (_HEADER, own.encode("latin-1"))]
            await send(message)

        ending = "answered"
        try:
            await self._app(scope, receive, answer)
        except BaseException:
            ending = "broken off"
            raise
        finally:
            fields = {
                **fields,
                "method": scope["method"],
                "path": scope["path"],
                "status": status or None,
                "seconds": round(time.monotonic() - begun, 4),
            }
            self._responded(status)
            LOGGER.info(ending, extra={"fields": fields})
