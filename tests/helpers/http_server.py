"""A server of a tiny trained model on the loopback, in a thread of the test process or in a process of its own."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import selfspec
from helpers.saved_folders import checkpoint_folder
from helpers.tokenizers import PLAIN
from selfspec.serve.app import create_app
from selfspec.serve.client_limits import PacedServer, ServerLimits
from selfspec.serve.served import Served

NAME = "stories"


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.raw)
        return found

    @property
    def events(self) -> list[dict[str, Any]]:
        """Of a stream, which ended as it should."""
        lines = [line.removeprefix("data: ") for line in self.raw.decode().split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class Running:
    port: int
    served: Served
    spec: selfspec.SelfSpeculative
    tokenizer: PreTrainedTokenizerBase

    def ask(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> Reply:
        return asked(self.port, path, body, method, **headers)

    def complete(self, **fields: Any) -> Reply:
        return self.ask("/v1/completions", {"model": NAME, "prompt": "Once upon", "max_tokens": 8, **fields})

    def chat(self, **fields: Any) -> Reply:
        messages = [{"role": "user", "content": "Tell me of Lily."}]
        return self.ask("/v1/chat/completions", {"model": NAME, "messages": messages, "max_tokens": 8, **fields})

    def respond(self, **fields: Any) -> Reply:
        body = {"model": NAME, "input": "Tell me of Lily.", "max_output_tokens": 12, "temperature": 0, **fields}
        return self.ask("/v1/responses", body)

    def message(self, **fields: Any) -> Reply:
        messages = [{"role": "user", "content": "Tell me of Lily."}]
        body = {"model": NAME, "messages": messages, "max_tokens": 12, "temperature": 0, **fields}
        return self.ask("/v1/messages", body)

    def settled(self) -> None:
        for _ in range(500):
            stats = self.served.engine.stats()
            if stats.running + stats.prefilling + stats.waiting == 0 and stats.cache_bytes == 0:
                return
            threading.Event().wait(0.01)
        raise AssertionError(f"rows were left: {self.served.engine.stats()}")


def asked(port: int, path: str, body: Any = None, method: str | None = None, **headers: str) -> Reply:
    """Send one request to a server on the loopback; a body that is no bytes is sent as JSON."""
    sent = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    fields = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method or ("GET" if body is None else "POST"), path, sent, fields)
        reply = connection.getresponse()
        return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())


@contextmanager
def running(
    limits: ServerLimits | None = None,
    api_keys: Sequence[str] = (),
    template: str | None = PLAIN,
    log_text: bool = False,
    model: PreTrainedModel | None = None,
    draft: str = "lookup+exit:3",
    aliases: Sequence[str] = (),
    origins: Sequence[str] = (),
    hosts: Sequence[str] = ("*",),
    folder: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **engine: Any,
) -> Iterator[Running]:
    """Serve the stories, another checkpoint, or a model, in float64, drafting by look-ups and an exit, in a thread."""
    folder = folder or str(checkpoint_folder())
    model = model or AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(folder)
    spec = selfspec.wrap(model, draft=draft, draft_length=3)
    engine_of = selfspec.Engine(spec, **engine)
    served = Served(engine_of, tokenizer, NAME, template=template, limits=limits, log_text=log_text, aliases=aliases)
    with listening(create_app(served, api_keys, 30, origins, hosts), served.limits) as port:
        yield Running(port, served, spec, tokenizer)


@contextmanager
def listening(app: FastAPI, limits: ServerLimits) -> Iterator[int]:
    """Serve an application on a free port of the loopback, in a thread."""
    config = uvicorn.Config(
        app,
        port=0,
        http="h11",
        lifespan="on",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=30,
    )
    server = PacedServer(config, limits)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), name="test-server")
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()
