"""A small client of OpenAI's endpoints on the loopback: asks, times what streams back, and may leave early."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """What came back of one request.

    Attributes:
        status: of HTTP; 0: the connection broke before there was one.
        text: of the first answer.
        finish_reason: why it ended; None: it did not.
        usage: as the server counts it; empty without a usage event.
        begun: when it was asked, by `time.perf_counter`.
        times: when each piece of text came.
        left: whether the client left before the end.
        error: as the server wrote it.
    """

    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    begun: float = 0.0
    times: list[float] = field(default_factory=list)
    left: bool = False
    error: dict[str, Any] = field(default_factory=dict)


async def ask(port: int, path: str, body: dict[str, Any] | bytes, leave_after: int | None = None) -> Answer:
    """Send one request and read its answer.

    Args:
        port: of the loopback.
        path: of the endpoint.
        body: as JSON, or as it is sent.
        leave_after: pieces after which the client leaves; None: it stays.
    """
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = Answer(begun=time.perf_counter())
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    except OSError:
        return answer
    try:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(sent)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + sent)
        await writer.drain()
        status = await reader.readline()
        if not status:
            return answer
        answer.status = int(status.split()[1])
        streamed = False
        while (line := await reader.readline()) not in (b"\r\n", b""):
            streamed |= line.lower().startswith(b"content-type: text/event-stream")
        if not streamed:
            _take(answer, json.loads((await reader.read()).decode()))
            return answer
        # Sizes of chunks stand on lines of their own, which do not begin so.
        while line := await reader.readline():
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            if _take(answer, json.loads(line[6:])):
                answer.times.append(time.perf_counter())
            if leave_after is not None and len(answer.times) >= leave_after:
                answer.left = True
                return answer
    except (OSError, ValueError):
        pass
    finally:
        writer.close()
    return answer


def _take(answer: Answer, event: dict[str, Any]) -> bool:
    """Take an event or a whole answer; whether it has text."""
    answer.error = event.get("error") or answer.error
    answer.usage = event.get("usage") or answer.usage
    said = ""
    for choice in event.get("choices", ())[:1]:
        said = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        answer.text += said
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return bool(said)
