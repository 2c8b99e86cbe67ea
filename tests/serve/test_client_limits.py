"""Clients that send too much, too slowly, what takes long, or leave, and many of them: the others are served.

And what operators see: health, metrics, logs, and the page of the endpoints.
"""

from __future__ import annotations

import json
import logging
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers.http_server import NAME, Reply, Running, running
from selfspec.serve.client_limits import ServerLimits
from selfspec.serve.monitoring import LOGGER, JsonLines

BODY = b'{"model": "stories", "prompt": "Once upon", "max_tokens": 400, "temperature": 0, "ignore_eos": true%s}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n"


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    with running(ServerLimits(body_bytes=2000, client_seconds=0.5), max_rows=1, max_waiting=2) as found:
        yield found


@pytest.fixture(scope="module")
def crowded() -> Iterator[Running]:
    with running(ServerLimits(connections=8)) as found:
        yield found


def opened(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def unfinished(server: Running) -> int:
    stats = server.served.engine.stats()
    return stats.running + stats.prefilling + stats.waiting


def of_length(body: bytes) -> bytes:
    return b"Content-Length: %d\r\n\r\n" % len(body) + body


def request(body: bytes) -> bytes:
    return POST + b"Content-Type: application/json\r\n" + of_length(body)


Meanwhile = Callable[..., Future[Reply]]


@contextmanager
def several(server: Running, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as connections:
        yield [connections.enter_context(opened(server)) for _ in range(count)]


@pytest.fixture
def meanwhile() -> Iterator[Meanwhile]:
    with ThreadPoolExecutor() as threads:
        yield threads.submit


def read_all(connection: socket.socket) -> bytes:
    found = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(4096):
            found += piece
    return found


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", POST + b"X: "])
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
        with suppress(OSError):
            for _ in range(40):
                connection.sendall(b"X: a\r\n")
                time.sleep(0.1)
        assert time.monotonic() - begun < 3


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"Content-Length: 100\r\n\r\n{", b"408"),
        (b"Content-Length: 10000000\r\n\r\n", b"413"),
        (b"Transfer-Encoding: chunked\r\n\r\n1000\r\n" + b"a" * 4096 + b"\r\n", b"413"),
    ],
    ids=["without an end", "huge", "huge in chunks"],
)
def test_bodies_without_an_end_and_huge_ones(strict: Running, sent: bytes, status: bytes) -> None:
    with opened(strict) as connection:
        connection.sendall(POST + sent)
        assert status in read_all(connection)


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


def test_a_page_of_another_site_reaches_no_local_server() -> None:
    """Its name may resolve to this machine: the header tells."""
    with running(hosts=("localhost", "127.0.0.1", "[::1]")) as server:
        for host, status in (("evil.example", 400), (f"localhost:{server.port}", 200), ("[::1]:80", 200)):
            assert server.ask("/health", host=host).status == status
        reply = server.ask("/v1/models/", host=f"127.0.0.1:{server.port}")
        assert (reply.status, reply.headers.get("location")) == (404, None)


def test_a_full_queue(strict: Running) -> None:
    with several(strict, 3) as connections:
        for count, connection in enumerate(connections):
            connection.sendall(request(BODY % b""))
            while unfinished(strict) <= count:
                time.sleep(0.002)
        reply = strict.complete()
        assert reply.status == 429
        assert reply.headers["retry-after"] == "1"
        assert reply.body["error"]["type"] == "rate_limit_error"
        # Of several answers none is begun.
        assert strict.complete(n=2).status == 429
    strict.settled()


def test_the_time_of_a_request_is_bounded() -> None:
    with running(ServerLimits(request_seconds=0.05)) as server:
        reply = server.complete(max_tokens=480, temperature=0, ignore_eos=True)
        assert reply.status == 408
        assert reply.body["error"]["code"] == "request_timeout"
        streamed = server.complete(max_tokens=480, temperature=0, ignore_eos=True, stream=True)
        assert streamed.events[-1]["error"]["code"] == "request_timeout"
        server.settled()


def test_stopping_finishes_what_runs_and_takes_nothing_new(meanwhile: Meanwhile) -> None:
    with running() as server:
        reply = meanwhile(server.complete, max_tokens=80, temperature=0, ignore_eos=True)
        while not server.served.engine.stats().running:
            time.sleep(0.005)
        assert server.ask("/ready").body == {"status": "ready"}
        server.served.stopping = True
        assert server.complete().status == 503
        assert server.ask("/ready").status == 503
        assert server.ask("/health").body == {"status": "ok"}
    assert reply.result(30).status == 200
    assert reply.result().body["usage"]["completion_tokens"] == 80


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


def test_nobody_waits_behind_the_text_of_another(server: Running, watched: Watched, meanwhile: Meanwhile) -> None:
    reply = meanwhile(server.complete, prompt="wait")
    try:
        assert watched.waiting.wait(30)
        assert server.complete().status == 200
    finally:
        watched.go_on.set()
    assert reply.result(30).status == 200


# Each held up everybody for seconds, the first one for 66, or took hundreds of megabytes.
MANY: dict[str, tuple[str, dict[str, Any]]] = {
    "objects": (
        "/v1/messages",
        {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "system": [{}] * 300_000},
    ),
    "numbers for texts": (
        "/v1/messages",
        {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "stop_sequences": list(range(450_000))},
    ),
    "unknown fields": ("/v1/completions", {"prompt": "a", **{f"x{number}": 1 for number in range(200_000)}}),
    "unknown fields within": ("/v1/chat/completions", {"messages": [{f"x{number}": 1 for number in range(200_000)}]}),
    "short messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 30_000}),
    "long messages": ("/v1/responses", {"input": [{"role": "user", "content": "a " * 150}] * 12_000}),
    "ids": ("/v1/completions", {"prompt": [1] * 1_300_000}),
    "fewer ids": ("/v1/completions", {"prompt": [1] * 500_000}),
    "text": ("/v1/completions", {"prompt": "Lily said " * 390_000}),
    "texts": ("/v1/completions", {"prompt": ['"\\'] * 500_000}),
    "nested": ("/v1/completions", {"prompt": json.loads("[" * 300 + "]" * 300)}),
    # What is wrong a thousand times is refused once: this took 13 s.
    "an id behind texts": ("/v1/completions", {"prompt": ["a"] * 300_000 + [1]}),
    "a text behind ids": ("/v1/completions", {"prompt": [1] * 300_000 + ["a"]}),
    "lists of ids": ("/v1/completions", {"prompt": [[1]] * 300_000}),
    "biases": ("/v1/completions", {"prompt": "a", "logit_bias": {f"x{number}": 1 for number in range(50_000)}}),
}


@pytest.mark.parametrize("name", MANY)
def test_bodies_of_many_things_keep_nobody_waiting(server: Running, meanwhile: Meanwhile, name: str) -> None:
    path, fields = MANY[name]
    body = json.dumps({"model": NAME, **fields}).encode()
    before = metrics(server)["process_resident_memory_bytes"]
    replies = [meanwhile(server.ask, path, body) for _ in range(4)]
    slowest = 0.0
    while not all(reply.done() for reply in replies):
        begun = time.monotonic()
        assert server.ask("/health").status == 200
        slowest = max(slowest, time.monotonic() - begun)
    assert {reply.result().status for reply in replies} == {400}
    assert slowest < 2
    assert metrics(server)["process_resident_memory_bytes"] - before < 300 * 2**20


def test_what_many_short_texts_hide_is_counted(server: Running) -> None:
    for text in ('a"b', "a\\", "[{", ","):
        assert server.complete(prompt="Once " + text).status == 200
        assert server.complete(prompt=text * 100, stop=[text * 9] * 32).status == 200


def test_without_the_key_no_body_is_read() -> None:
    with running(api_keys=("secret",)) as server, opened(server) as connection:
        connection.sendall(POST + b"Content-Type: application/json\r\nContent-Length: 4000000\r\n\r\n")
        assert b" 401 " in read_all(connection)


def schema(fields: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": fields}}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (schema({"enum": [f"value {number}" for number in range(20_000)]}), "characters"),
        (
            schema({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}),
            "maxProperties only",
        ),
        (schema({"$ref": "#"}), "no answer fits"),
    ],
)
def test_grammars_that_would_take_long_or_never_end_are_refused(
    server: Running, fields: dict[str, Any], words: str
) -> None:
    pytest.importorskip("llguidance")
    reply = server.complete(**fields)
    assert (reply.status, reply.body["error"]["param"]) == (400, "response_format")
    assert words in reply.body["error"]["message"]


LONG = "([a-z]{1,60}[0-9]{1,60}){1,40}"
BOUNDED = {"type": "integer", "minimum": -(10**17), "maximum": 10**17}
SLOW: dict[str, dict[str, Any]] = {
    "a long expression for names": {"type": "object", "patternProperties": {f"^{LONG}$": {"type": "integer"}}},
    "bounds of 18 digits": {
        "type": "object",
        "properties": {f"p{each}": {**BOUNDED, "minimum": each - 10**17} for each in range(450)},
    },
    "properties that may be missing": {
        "type": "object",
        "properties": {f"p{each}": {} for each in range(500)},
        "minProperties": 250,
    },
}


@pytest.mark.parametrize("name", SLOW)
def test_grammars_that_clients_left_behind_keep_nobody_waiting(
    server: Running, meanwhile: Meanwhile, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """Two of them stopped everybody's grammars, and the process; what is refused of them is not written to stderr."""
    pytest.importorskip("llguidance")
    body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 4, **schema(SLOW[name])}).encode()
    for _ in range(4):
        with opened(server) as connection:
            connection.sendall(request(body))
            time.sleep(0.02)
    begun = time.monotonic()
    reply = server.complete(response_format={"type": "regex", "pattern": "yes|no"})
    assert reply.body["choices"][0]["text"] in ("yes", "no")
    assert time.monotonic() - begun < 10
    server.settled()
    # Nothing of the library's own comes out, which would show what clients sent.
    assert "minProperties" not in capfd.readouterr().err


def test_what_grammars_need_is_loaded_before_requests_come(server: Running) -> None:
    pytest.importorskip("llguidance")
    loaded = set(sys.modules)
    assert server.complete(response_format={"type": "regex", "pattern": "on|off"}).status == 200
    assert not [name for name in set(sys.modules) - loaded if name.startswith("llguidance")]


@pytest.mark.contract
def test_a_grammar_that_takes_long_keeps_nobody_waiting_and_has_the_time_of_a_request(
    server: Running, meanwhile: Meanwhile, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    grammars = server.served.grammars
    compiled, begun, go_on = grammars.compiled, threading.Semaphore(0), threading.Event()

    def slow(wanted: Any) -> Any:
        if wanted == "[a-z]{400}":
            begun.release()
            assert go_on.wait(30)
            # Nobody waits for it any more.
            return None
        return compiled(wanted)

    monkeypatch.setattr(grammars, "compiled", slow)
    monkeypatch.setattr(server.served, "limits", ServerLimits(request_seconds=2))
    body = {"response_format": {"type": "regex", "pattern": "[a-z]{400}"}}
    reply = meanwhile(server.complete, **body)
    try:
        assert begun.acquire(timeout=30)
        short = server.complete(response_format={"type": "regex", "pattern": "yes|no"})
        assert short.body["choices"][0]["text"] in ("yes", "no")
        other = meanwhile(server.complete, **body)
        assert begun.acquire(timeout=30)
        # The next one never begins, and is taken out of the queue.
        queue = server.served._compilers._work_queue
        second = opened(server)
        second.sendall(request(json.dumps({"model": NAME, "prompt": "a", **body}).encode()))
        while not queue.qsize():
            time.sleep(0.01)
        second.close()
        for each in (reply, other):
            assert (each.result(30).status, each.result().body["error"]["code"]) == (408, "request_timeout")
    finally:
        go_on.set()
    while queue.qsize():
        time.sleep(0.01)


def test_idle_connections_make_room(crowded: Running) -> None:
    with several(crowded, 8) as first:
        time.sleep(0.3)
        with several(crowded, 4) as later:
            assert crowded.ask("/health").status == 200
            assert crowded.complete().status == 200
            # Some of the first ones are closed, none of those that came later.
            closed, _, _ = select.select(first, [], [], 5)
            assert closed
            assert closed[0].recv(1) == b""
            for each in later:
                each.sendall(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
                assert b"200" in each.recv(4096)


def test_health_is_answered_while_too_many_requests_run(crowded: Running) -> None:
    with several(crowded, 8) as busy:
        for each in busy:
            each.sendall(request(BODY % b', "stream": true'))
        for each in busy:
            assert b"200" in each.recv(4096)
        reply = crowded.complete()
        assert (reply.status, reply.body["error"]["code"]) == (503, "too_many_connections")
        assert reply.headers["retry-after"] == "1"
        assert crowded.ask("/health").status == 200
    crowded.settled()


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0", (b" 400 ", b"content-length")),
        (b"\x16\x03\x01", (b" 400 ",)),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20, (b" 400 ",)),
    ],
    ids=["two lengths", "a greeting in TLS", "more of it"],
)
def test_what_is_no_request_is_refused(server: Running, sent: bytes, words: tuple[bytes, ...]) -> None:
    with opened(server) as connection:
        connection.sendall(sent + b"\r\n\r\n")
        reply = read_all(connection)
    assert all(each in reply for each in words)


def test_a_body_without_a_content_type(server: Running) -> None:
    with opened(server) as connection:
        connection.sendall(POST + b"Connection: close\r\n" + of_length(b'{"model": "stories", "prompt": "a"}'))
        assert b"content-type" in read_all(connection).partition(b"\r\n\r\n")[2]


def metrics(server: Running) -> dict[str, float]:
    """Values by name and labels other than the model's."""
    found = {}
    for family in text_string_to_metric_families(server.ask("/metrics").raw.decode()):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            found[sample.name + (str(labels) if labels else "")] = sample.value
    return found


def test_metrics_count_what_was_done(server: Running) -> None:
    before = metrics(server)
    usage = server.complete(temperature=0, max_tokens=12, n=2).body["usage"]
    server.settled()
    after = metrics(server)

    def more(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert more("vllm:generation_tokens_total") == 24
    assert more("vllm:time_to_first_token_seconds_count") == 2
    assert more("vllm:inter_token_latency_seconds_count") >= 12
    assert more("vllm:request_success_total{'finished_reason': 'length'}") == 2
    details = usage["completion_tokens_details"]
    assert 0 < details["accepted_draft_tokens"] <= usage["completion_tokens"] == 24
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + 24
    assert usage["prompt_tokens"] == len(server.tokenizer("Once upon").input_ids)
    assert more("vllm:spec_decode_num_accepted_tokens_total") == details["accepted_draft_tokens"]
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["process_resident_memory_bytes"] > 10**7


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_ask_for_heads(server: Running, path: str) -> None:
    reply = server.ask(path, method="HEAD")
    assert (reply.status, reply.raw) == (200, b"")


def test_ids_of_requests(server: Running) -> None:
    assert server.ask("/health", X_Request_Id="mine-7").headers["x-request-id"] == "mine-7"
    made = server.ask("/health", X_Request_Id="a b\x01").headers["x-request-id"]
    assert len(made) == 32
    assert server.complete(model="none").headers["x-request-id"]


@pytest.mark.parametrize("log_text", [False, True])
def test_the_log_has_a_line_a_request_and_no_text_unless_asked(
    caplog: pytest.LogCaptureFixture, log_text: bool
) -> None:
    with caplog.at_level(logging.INFO, LOGGER.name), running(log_text=log_text) as server:
        answers = [
            server.chat(temperature=0),
            server.complete(prompt="Tell me of Lily.", stream=True),
            server.complete(temperature="hot"),
        ]
    said = answers[0].body["choices"][0]["message"]["content"]
    ids = [answer.headers["x-request-id"] for answer in answers]
    # Another server of this process may still write of its own requests.
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records if record.name == LOGGER.name]
    lines = sorted(
        (line for line in lines if line["request_id"] in ids), key=lambda line: ids.index(line["request_id"])
    )
    assert [line["status"] for line in lines] == [200, 200, 400]
    assert [line.get("completion_tokens") for line in lines] == [8, 8, None]
    assert lines[0]["finish_reasons"] == ["length"]
    written = json.dumps(lines)
    assert ("Tell me of Lily." in written) == log_text
    assert (json.dumps(said)[1:-1] in written) == log_text


def test_a_failure_has_an_id_a_status_and_one_traceback(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server.served, "check", Mock(side_effect=RuntimeError("a planted failure")))
    with caplog.at_level(logging.INFO):
        reply = server.complete()
        # Its line is written once it was sent.
        while not any(record.getMessage() == "answered" for record in caplog.records[-3:]):
            time.sleep(0.01)
    assert (reply.status, reply.body["error"]["type"]) == (500, "server_error")
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    own = [line for line in lines if line.get("request_id") == reply.headers["x-request-id"]]
    assert [line.get("status") for line in own] == [None, 500]
    assert json.dumps(lines).count("RuntimeError: a planted failure") == 1


def test_a_broken_engine_is_no_health() -> None:
    with running() as server:
        server.served.engine.stop(drain=False)
        assert server.ask("/health").status == 503
        assert server.complete().status == 503


def test_the_page_of_the_endpoints_needs_nothing_from_elsewhere_and_describes_refusals(server: Running) -> None:
    page = server.ask("/docs").raw.decode()
    assert "http://" not in page
    assert "https://" not in page
    described = server.ask("/openapi.json").body
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/ready", "/metrics"} <= described[
        "paths"
    ].keys()
    responses = described["paths"]["/v1/completions"]["post"]["responses"]
    assert responses.keys() == {"200", "4XX", "503"}
    schemas = described["components"]["schemas"]
    assert "HTTPValidationError" not in schemas
    reply = server.complete(temperature="hot")
    assert reply.status == 400
    assert reply.body.keys() == schemas["Refusal"]["properties"].keys()
    assert reply.body["error"].keys() == schemas["RefusalError"]["properties"].keys()
