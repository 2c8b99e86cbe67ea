"""Running an application until it is told to stop; what runs is then finished."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from selfspec.errors import UnsupportedOptionError
from selfspec.serve.client_limits import HEADER_BYTES, bounded_headers
from selfspec.serve.request_log import LOGGER, JsonLines
from selfspec.serve.served import Served

_LOGGERS = (LOGGER.name, "uvicorn.error")


def listen(host: str, port: int) -> socket.socket:
    """Bind an address, before a model is loaded for it; port 0 is any that is free.

    Raises:
        UnsupportedOptionError: it cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, port))
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise UnsupportedOptionError(
            f"--host {host} --port {port} cannot be listened on ({error.strerror or error}); choose another port"
        ) from error
    return bound


def run(app: FastAPI, served: Served, bound: socket.socket, stop_seconds: float, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; then take no more requests and finish those that run within `stop_seconds`.

    A second SIGINT ends them at once. What `listen` bound is closed at the end. `ready` is called when requests are
    taken.
    """
    config = uvicorn.Config(
        app,
        http=bounded_headers(served.limits),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(int(stop_seconds), 1),
        h11_max_incomplete_event_size=HEADER_BYTES,
    )
    with _signals_that_end_well(), _json_log(), bound:
        _Server(config, served, ready).run([bound])


class _Server(uvicorn.Server):
    """Says when it is ready, and refuses requests once it is told to stop."""

    def __init__(self, config: uvicorn.Config, served: Served, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._served = served
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._served.stopping = True
        super().handle_exit(sig, frame)


@contextmanager
def _signals_that_end_well() -> Iterator[None]:
    """Uvicorn sends itself the signals again that it was stopped by; the process then ends as it would in any case."""
    kept = {kind: signal.signal(kind, lambda *_: None) for kind in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for kind, handler in kept.items():
            signal.signal(kind, handler)


@contextmanager
def _json_log() -> Iterator[None]:
    """Lines of JSON on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    kept = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, kept, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
