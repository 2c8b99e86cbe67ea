"""The application: its doors, each a path with the fields that it takes; and serving it until it is told to stop."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any, NamedTuple

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse, Response

from selfspec.errors import UnsupportedOptionError
from selfspec.serve.api_error import ApiError, unknown_model
from selfspec.serve.client_limits import ClientPace, PacedServer
from selfspec.serve.endpoints.chat_completions import answer_as, chat
from selfspec.serve.endpoints.completions import complete
from selfspec.serve.endpoints.messages import CountRequest, MessagesRequest, count_tokens
from selfspec.serve.endpoints.ollama import OllamaChat, OllamaGenerate, ShowRequest, listings, ollama, show
from selfspec.serve.endpoints.responses import ResponsesRequest, respond
from selfspec.serve.monitoring import LOG_CONFIG, LOGGER, RequestLog
from selfspec.serve.schemas import ChatCompletionRequest, CompletionRequest, Refusal
from selfspec.serve.served import Served, ServedModel
from selfspec.version import __version__

_REFUSED: dict[int | str, dict[str, Any]] = {
    status: {"model": Refusal, "description": "Refused, and why"} for status in ("4XX", 503)
}

# The part of the time to stop in which answers may come to their end; in the rest they are given up, and written.
_OF_STOP_SECONDS = 0.9

# The status of a process that SIGINT ended.
_INTERRUPTED = 130


class _Door(NamedTuple):
    """An endpoint: its path, what it is for, its fields, what answers, and how the fields are sent."""

    path: str
    summary: str
    fields: type[BaseModel]
    answer: Callable[[Any, Request, Any], Awaitable[Response | dict[str, Any]]]
    sent: str = "application/json"


_DOORS = (
    _Door("/v1/chat/completions", "Answer messages", ChatCompletionRequest, chat),
    _Door("/v1/completions", "Go on with text", CompletionRequest, complete),
    _Door("/v1/responses", "Answer a conversation, as OpenAI's newer clients ask", ResponsesRequest, respond),
    _Door("/v1/messages", "Answer messages, as Anthropic's clients ask", MessagesRequest, answer_as),
    _Door("/v1/messages/count_tokens", "Count the tokens of messages", CountRequest, count_tokens),
    _Door("/api/chat", "Answer messages, as Ollama's clients ask", OllamaChat, ollama),
    _Door("/api/generate", "Answer a prompt, as Ollama's clients ask", OllamaGenerate, ollama),
    _Door("/api/show", "Describe the model, as Ollama's clients ask", ShowRequest, show),
)


def _doors(served: ServedModel) -> Sequence[_Door]:
    if isinstance(served, Served):
        return _DOORS
    # Who serves no sound needs none of its libraries.
    from selfspec.serve.endpoints.transcriptions import TranscriptionRequest, transcribe

    path, form = "/v1/audio/transcriptions", "multipart/form-data"
    return [_Door(path, "Write what is said in a sound", TranscriptionRequest, transcribe, form)]


def create_app(
    served: ServedModel,
    api_keys: Sequence[str] = (),
    stop_seconds: float | None = 30.0,
    origins: Sequence[str] = (),
    hosts: Sequence[str] = ("*",),
) -> FastAPI:
    """Make the application, whose engine starts and stops with it and ends running rows after `stop_seconds`.

    Requests below /v1 and /api need one of `api_keys`, if there are any; scripts of pages of `origins` ("*": of any)
    may ask. Requests to others than `hosts`, by their header, are refused: a page of any site may be told that its own
    name is this machine.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        served.engine.start()
        try:
            yield
        finally:
            served.stopping = True
            served.engine.stop(drain=True, timeout=stop_seconds)
            served.close()

    # Its page of /docs loads nothing from elsewhere.
    app: FastAPI = FastAPIOffline(
        redoc_url=None,
        title="selfspec",
        summary=f"{served.name}, which drafts for itself",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.include_router(_operation(served))
    app.include_router(_models(served))
    if isinstance(served, Served):
        app.include_router(listings(served))
    doors, app.state.origins = _doors(served), origins
    for door in doors:
        content = {door.sent: {"schema": {"$ref": f"#/components/schemas/{door.fields.__name__}"}}}
        app.add_api_route(
            door.path,
            _endpoint(served, door),
            methods=["POST"],
            summary=door.summary,
            tags=["requests"],
            responses=_REFUSED,
            response_model=None,
            openapi_extra={"requestBody": {"required": True, "content": content}},
        )
    described = app.openapi

    def openapi() -> dict[str, Any]:
        # Bodies are read after they were counted, so FastAPI knows none of their fields.
        where, found = "#/components/schemas/{model}", described()
        _, fields = models_json_schema([(door.fields, "validation") for door in doors], ref_template=where)
        found["components"]["schemas"] |= fields["$defs"]
        return found

    app.openapi = openapi  # type: ignore[method-assign]
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    app.add_middleware(ClientPace, limits=served.limits, api_keys=api_keys)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RequestLog, responded=served.metrics.responded)
    _add_errors(app)
    return app


def _endpoint(served: ServedModel, door: _Door) -> Callable[[Request], Awaitable[Response | dict[str, Any]]]:
    async def endpoint(http: Request) -> Response | dict[str, Any]:
        return await door.answer(served, http, await served.parse(http, door.fields))

    return endpoint


def _operation(served: ServedModel) -> APIRouter:
    """Answer what operators ask: is it alive, does it take requests, how is it doing."""
    router = APIRouter(tags=["operation"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health", summary="Whether the engine lives")
    async def health() -> JSONResponse:
        alive = served.engine.running or served.stopping
        return JSONResponse({"status": "ok" if alive else "the engine broke"}, 200 if alive else 503)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", summary="Whether requests are taken")
    async def ready() -> JSONResponse:
        taken = served.engine.running and not served.stopping
        return JSONResponse({"status": "ready" if taken else "stopping"}, 200 if taken else 503)

    @router.get("/version", summary="The version of selfspec")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/metrics", summary="Metrics for Prometheus")
    async def metrics() -> Response:
        return Response(served.metrics.written(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def _models(served: ServedModel) -> APIRouter:
    """Tell which model there is."""
    router = APIRouter(prefix="/v1/models", tags=["operation"], responses=_REFUSED)

    def card(name: str) -> dict[str, Any]:
        more = {"created": served.created, "owned_by": "selfspec", "max_model_len": served.engine.longest}
        return {"id": name, "object": "model", "type": "model", "display_name": name, **more}

    @router.get("", summary="The model that is served")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in served.names]}

    @router.get("/{name:path}", summary="The model of a name")
    async def model(name: str) -> dict[str, Any]:
        if name not in served.names:
            raise unknown_model(name, served.name)
        return card(name)

    return router


def _add_errors(app: FastAPI) -> None:
    """Write every refusal and failure in OpenAI's form."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> JSONResponse:
        return error.response(request.url.path)

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> JSONResponse:
        path = request.url.path
        said = f"{error.detail}: {path}; /docs shows what there is"
        return ApiError(error.status_code, said, headers=error.headers).response(path)


def listen(host: str, port: int) -> socket.socket:
    """Bind an address, before a model is loaded for it; port 0 is any free one."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise UnsupportedOptionError(
            f"--host {host} --port {port} cannot be listened on ({error.strerror or error}); choose another port"
        ) from error
    return bound


def run(
    app: FastAPI, served: ServedModel, bound: socket.socket, stop_seconds: float, ready: Callable[[], None]
) -> None:
    """Serve on what `listen` bound, and call `ready` once requests are taken.

    SIGTERM or SIGINT: take no more requests, finish those that run, and end the process within `stop_seconds`, whatever
    still runs; a second SIGINT ends it at once.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_config=LOG_CONFIG,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=64 * 2**10,
    )
    # What a loaded model and its libraries consist of stays: to look through it again holds up all requests for a
    # quarter of a second, each time that many things were made.
    gc.collect()
    gc.freeze()
    try:
        with bound:
            _Server(config, served, stop_seconds, ready).run([bound])
    finally:
        # Libraries complain of what is still there when the process ends.
        gc.unfreeze()


class _Server(PacedServer):
    """Tells when it is ready; once it is told to stop, it refuses requests, and the process ends in time."""

    def __init__(
        self, config: uvicorn.Config, served: ServedModel, stop_seconds: float, ready: Callable[[], None]
    ) -> None:
        super().__init__(config, served.limits)
        self._served = served
        self._stop_seconds = stop_seconds
        self._ready = ready
        self._told = threading.Event()
        # A handler of signals must not start threads: it may interrupt the start of another.
        threading.Thread(target=self._end_in_time, name="selfspec-stop", daemon=True).start()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            os._exit(_INTERRUPTED)
        self._served.stopping = True
        self._told.set()
        # Uvicorn would note the signal, and send it to the process again once it was stopped.
        self.should_exit = True

    def _end_in_time(self) -> None:
        """End the rows that still run shortly before the time is over, and then the process, which may have threads."""
        self._told.wait()
        end = threading.Timer(self._stop_seconds, self._give_up)
        end.daemon = True
        end.start()
        time.sleep(_OF_STOP_SECONDS * self._stop_seconds)
        self._served.engine.stop(drain=False)

    def _give_up(self) -> None:
        LOGGER.warning("something still ran when the time to stop was over, and was given up")
        os._exit(0)
