"""One client cannot stop the server for the others: huge texts, grammars that take long, many connections."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.http_server import NAME, Running, running
from selfspec.serve.client_limits import ServerLimits


@pytest.fixture(scope="module")
def crowded() -> Iterator[Running]:
    """A server with room for few connections."""
    with running(ServerLimits(connections=8)) as found:
        yield found


class Watched:
    """A tokenizer that notes the longest text it reads, and waits at one that says so."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.longest = 0
        self.waiting, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.longest = max(self.longest, len(text))
        if "wait" in text:
            self.waiting.set()
            assert self.go_on.wait(30)
        return self._tokenizer(text, **options)


@pytest.fixture
def watched(server: Running, monkeypatch: pytest.MonkeyPatch) -> Watched:
    found = Watched(server.tokenizer)
    monkeypatch.setattr(server.served, "tokenizer", found)
    return found


def test_a_text_far_beyond_the_context_is_not_tokenised(server: Running, watched: Watched) -> None:
    for text in ("Lily said " * 300_000, "a" * 3_000_000):
        reply = server.complete(prompt=text)
        assert (reply.status, reply.body["error"]["code"]) == (400, "context_length_exceeded")
        reply = server.chat(messages=[{"role": "user", "content": text}])
        assert (reply.status, reply.body["error"]["param"]) == (400, "messages")
    assert watched.longest <= 8 * server.served.engine.longest


def test_what_is_long_in_letters_and_short_in_tokens_is_taken(server: Running) -> None:
    """A bound on letters alone would refuse it."""
    longest = max(server.tokenizer.get_vocab(), key=len)
    text = server.tokenizer.decode(server.tokenizer.convert_tokens_to_ids([longest] * 300))
    assert server.complete(prompt=text).status == (
        200 if len(server.tokenizer(text).input_ids) < server.served.engine.longest - 8 else 400
    )


def test_nobody_waits_behind_the_text_of_another(server: Running, watched: Watched) -> None:
    replies = []
    slow = threading.Thread(target=lambda: replies.append(server.complete(prompt="wait")))
    slow.start()
    try:
        assert watched.waiting.wait(30)
        assert server.complete().status == 200
    finally:
        watched.go_on.set()
        slow.join(30)
    assert replies[0].status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a"] * 300_000 + [1]},
        {"prompt": [1] * 300_000 + ["a"]},
        {"prompt": [[1]] * 300_000},
        {"logit_bias": {f"x{number}": 1 for number in range(50_000)}},
        {f"x{number}": 1 for number in range(50_000)},
    ],
)
def test_what_is_wrong_a_thousand_times_is_refused_once(server: Running, fields: dict[str, Any]) -> None:
    begun = time.monotonic()
    assert server.complete(**fields).status == 400
    # It took 13 s for the first.
    assert time.monotonic() - begun < 5


def test_more_messages_than_the_context_has_tokens(server: Running) -> None:
    reply = server.chat(messages=[{"role": "user", "content": ""}] * 1000)
    assert (reply.status, reply.body["error"]["code"]) == (400, "context_length_exceeded")


def schema(fields: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": fields}}}


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (schema({"enum": [f"value {number}" for number in range(20_000)]}), "characters"),
        (schema({"enum": list(range(6000))}), "values"),
        (schema(nested(400)), "deep"),
        (schema({"type": "object", "properties": {f"p{number}": {} for number in range(600)}}), "properties"),
        (schema({"type": "string", "pattern": "^((a{1,30}b){1,30}c){1,30}$"}), "states"),
        ({"response_format": {"type": "regex", "pattern": "(.{0,200}a.{0,200}b){0,200}"}}, "states"),
    ],
)
def test_grammars_that_would_take_long_are_refused(server: Running, fields: dict[str, Any], words: str) -> None:
    reply = server.complete(**fields)
    assert (reply.status, reply.body["error"]["param"]) == (400, "response_format")
    assert words in reply.body["error"]["message"]


def test_what_grammars_need_is_loaded_before_requests_come(server: Running) -> None:
    pytest.importorskip("xgrammar")
    loaded = set(sys.modules)
    assert server.complete(response_format={"type": "regex", "pattern": "on|off"}).status == 200
    assert not [name for name in set(sys.modules) - loaded if name.startswith("xgrammar")]


@pytest.mark.contract
def test_a_grammar_that_takes_long_keeps_nobody_waiting_and_has_the_time_of_a_request(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xgrammar")
    grammars = server.served.grammars
    compiled, begun, go_on = grammars.compiled, threading.Event(), threading.Event()

    def slow(wanted: Any) -> Any:
        if getattr(wanted, "pattern", "") == "[a-z]{400}":
            begun.set()
            assert go_on.wait(30)
            # Nobody waits for it any more.
            return None
        return compiled(wanted)

    monkeypatch.setattr(grammars, "compiled", slow)
    monkeypatch.setattr(server.served, "limits", ServerLimits(request_seconds=2))
    body = {"response_format": {"type": "regex", "pattern": "[a-z]{400}"}}
    replies = []
    first = threading.Thread(target=lambda: replies.append(server.complete(**body)))
    first.start()
    try:
        assert begun.wait(30)
        short = server.complete(response_format={"type": "regex", "pattern": "yes|no"})
        assert short.body["choices"][0]["text"] in ("yes", "no")
        # It never begins, and is taken out of the queue.
        queue = server.served._compilers[False]._work_queue
        second = socket.create_connection(("127.0.0.1", server.port))
        second.sendall(request({"model": NAME, "prompt": "a", **body}))
        while not queue.qsize():
            time.sleep(0.01)
        second.close()
        first.join(30)
        assert (replies[0].status, replies[0].body["error"]["code"]) == (408, "request_timeout")
    finally:
        go_on.set()
    while queue.qsize():
        time.sleep(0.01)


def request(body: dict[str, Any]) -> bytes:
    import json

    sent = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(sent) + sent


def test_idle_connections_make_room(crowded: Running) -> None:
    idle = [socket.create_connection(("127.0.0.1", crowded.port)) for _ in range(20)]
    try:
        assert crowded.ask("/health").status == 200
        assert crowded.complete().status == 200
        # The first ones were closed, the last were not.
        idle[0].settimeout(5)
        assert idle[0].recv(1) == b""
        idle[-1].sendall(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
        assert b"200" in idle[-1].recv(4096)
    finally:
        for each in idle:
            each.close()


def test_health_is_answered_while_too_many_requests_run(crowded: Running) -> None:
    body = {"model": NAME, "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    busy = [socket.create_connection(("127.0.0.1", crowded.port)) for _ in range(8)]
    try:
        for each in busy:
            each.sendall(request(body))
        for each in busy:
            assert b"200" in each.recv(4096)
        reply = crowded.complete()
        assert (reply.status, reply.body["error"]["code"]) == (503, "too_many_connections")
        assert reply.headers["retry-after"] == "1"
        assert crowded.ask("/health").status == 200
    finally:
        for each in busy:
            each.close()
    crowded.settled()


def raw(server: Running, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(sent)
        # Head and body may come one after the other; then the server closes.
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_headers_in_one_piece_are_bounded(server: Running) -> None:
    reply = raw(server, b"GET /health HTTP/1.1\r\nHost: h\r\nX: " + b"a" * 70_000 + b"\r\n\r\n")
    assert b" 431 " in reply
    assert b'"error"' in reply


def test_two_lengths_are_refused_in_json(server: Running) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    reply = raw(server, head)
    assert b" 400 " in reply
    assert b"content-length" in reply
    assert b'{"error"' in raw(server, b"\x16\x03\x01\r\n\r\n")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop": ["a"] * 33}, "32"),
        ({"prompt": [-1]}, "greater than or equal to 0"),
        ({"prompt": []}, "no list may be empty"),
        ({"prompt": [3, "a"]}, "integer"),
    ],
)
def test_a_refusal_names_what_is_wrong(server: Running, fields: dict[str, Any], words: str) -> None:
    reply = server.complete(**fields)
    assert reply.status == 400
    assert reply.body["error"]["param"] == next(iter(fields))
    assert words in reply.body["error"]["message"]


def test_a_schema_that_refers_to_itself_alone_is_refused(server: Running) -> None:
    pytest.importorskip("xgrammar")
    reply = server.complete(**schema({"$ref": "#"}))
    assert (reply.status, reply.body["error"]["param"]) == (400, "response_format")
    assert "no answer fits" in reply.body["error"]["message"]


def test_a_body_without_a_content_type(server: Running) -> None:
    sent = request({"model": NAME, "prompt": "a"}).replace(b"Content-Type: application/json", b"Connection: close")
    assert b"content-type" in raw(server, sent).partition(b"\r\n\r\n")[2]
