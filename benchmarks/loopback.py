"""A server in a process of its own on the loopback, and a small client of OpenAI's endpoints."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class ServerProcess:
    """A server that answers."""

    process: subprocess.Popen[bytes]
    port: int

    def resident(self) -> int:
        """Bytes of its memory that are resident."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def metrics(self) -> dict[str, float]:
        """Return the values of /metrics, by name without labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as reply:
            lines = [line for line in reply.read().decode().splitlines() if line and not line.startswith("#")]
        return {line.split("{")[0].split()[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    """Return a port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    command: Sequence[str], port: int, threads: int, log: Path, ready: str = "/health", seconds: float = 120
) -> Iterator[ServerProcess]:
    """Start a server, wait until it answers at `ready`, and end it afterwards.

    A RuntimeError: it ended, or does not answer in so many seconds.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as written:
        process = subprocess.Popen(command, stdout=written, stderr=written, env=environment)
    until = time.monotonic() + seconds
    try:
        while True:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{' '.join(command)} does not answer; see {log}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{ready}", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield ServerProcess(process, port)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass
class Answer:
    """Answer to one request, when it was asked and when each piece of text came, by `time.perf_counter`.

    A status of 0: the connection broke before there was one. A finish reason of None: the answer did not end; `left`:
    the client left before the end.
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
    """Send one request and read its answer; the client leaves after so many pieces of it."""
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
