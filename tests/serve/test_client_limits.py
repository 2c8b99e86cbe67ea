"""Clients that send too much, too slowly, or leave; and full queues."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from helpers.http_server import Running, running
from selfspec.serve.client_limits import ServerLimits

BODY = b'{"model": "stories", "prompt": "Once upon", "max_tokens": 400, "temperature": 0, "ignore_eos": true%s}'


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    """A server with little patience and room."""
    with running(ServerLimits(body_bytes=2000, client_seconds=0.5), max_rows=1, max_waiting=2) as found:
        yield found


def opened(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def request(body: bytes) -> bytes:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    return head % len(body) + body


def read_all(connection: socket.socket) -> bytes:
    found = b""
    try:
        while piece := connection.recv(4096):
            found += piece
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nX: "])
def test_headers_that_never_end(strict: Running, sent: bytes) -> None:
    """Uvicorn alone would wait as long as the client does."""
    begun = time.monotonic()
    with opened(strict) as connection:
        connection.sendall(sent)
        assert read_all(connection) == b""
    assert 0.3 < time.monotonic() - begun < 10


def test_headers_that_drip_after_a_first_request(strict: Running) -> None:
    with opened(strict) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
        assert b"200" in connection.recv(4096)
        begun = time.monotonic()
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        try:
            for _ in range(40):
                connection.sendall(b"X: a\r\n")
                time.sleep(0.1)
        except OSError:
            pass
        assert time.monotonic() - begun < 3


def test_endless_headers(strict: Running) -> None:
    with opened(strict) as connection:
        with suppress(OSError):
            connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * 200_000)
        # The reply is lost where the connection is reset while more is being sent.
        assert read_all(connection).split(b"\r\n")[0] in (b"HTTP/1.1 400 Bad Request", b"")
    assert strict.ask("/health").status == 200


def test_a_body_that_never_ends(strict: Running) -> None:
    with opened(strict) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\n{")
        assert b"408" in read_all(connection)


@pytest.mark.parametrize("chunked", [False, True])
def test_huge_bodies(strict: Running, chunked: bool) -> None:
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 10000000"
    with opened(strict) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n" + length + b"\r\n\r\n")
        if chunked:
            connection.sendall(b"1000\r\n" + b"a" * 4096 + b"\r\n")
        assert b"413" in read_all(connection)


def test_garbage(strict: Running) -> None:
    with opened(strict) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n")
        assert b"400" in read_all(connection)


@pytest.mark.parametrize("stream", [b"", b', "stream": true'])
def test_who_leaves_has_no_row(strict: Running, stream: bytes) -> None:
    before = strict.served.engine.stats().finished
    with opened(strict) as connection:
        connection.sendall(request(BODY % stream))
        while not strict.served.engine.stats().running:
            time.sleep(0.005)
    strict.settled()
    after = strict.served.engine.stats().finished
    assert after["cancelled"] == before.get("cancelled", 0) + 1


def test_a_full_queue(strict: Running) -> None:
    connections = [opened(strict) for _ in range(3)]
    try:
        for count, connection in enumerate(connections):
            connection.sendall(request(BODY % b""))
            while (lambda stats: stats.running + stats.prefilling + stats.waiting)(
                strict.served.engine.stats()
            ) <= count:
                time.sleep(0.002)
        reply = strict.complete()
        assert reply.status == 429
        assert reply.headers["retry-after"] == "1"
        assert reply.body["error"]["type"] == "rate_limit_error"
        # Of several answers none is begun.
        assert strict.complete(n=2).status == 429
    finally:
        for connection in connections:
            connection.close()
    strict.settled()


def test_the_time_of_a_request_is_bounded() -> None:
    with running(ServerLimits(request_seconds=0.05)) as server:
        reply = server.complete(max_tokens=480, temperature=0, ignore_eos=True)
        assert reply.status == 408
        assert reply.body["error"]["code"] == "request_timeout"
        streamed = server.complete(max_tokens=480, temperature=0, ignore_eos=True, stream=True)
        assert streamed.events[-1]["error"]["code"] == "request_timeout"
        server.settled()


def test_stopping_finishes_what_runs_and_takes_nothing_new() -> None:
    replies = []
    with running() as server:
        thread = threading.Thread(
            target=lambda: replies.append(server.complete(max_tokens=80, temperature=0, ignore_eos=True))
        )
        thread.start()
        while not server.served.engine.stats().running:
            time.sleep(0.005)
        server.served.stopping = True
        assert server.complete().status == 503
        assert server.ask("/ready").status == 503
        assert server.ask("/health").status == 200
    thread.join(30)
    assert replies[0].status == 200
    assert replies[0].body["usage"]["completion_tokens"] == 80
