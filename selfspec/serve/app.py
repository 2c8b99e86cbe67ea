"""The application with its endpoints, and running it: one server until it is told to stop, or replicas by Ray Serve."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from selfspec.errors import UnsupportedOptionError
from selfspec.serve.api_error import ApiError, unknown_model, validation_error
from selfspec.serve.client_limits import HEADER_BYTES, ClientPace, bounded_headers
from selfspec.serve.endpoints.answering import ClientLeftError
from selfspec.serve.endpoints.chat_completions import chat, read_chat
from selfspec.serve.endpoints.completions import complete
from selfspec.serve.endpoints.messages import CountRequest, MessagesRequest, count_tokens, message
from selfspec.serve.endpoints.responses import ResponsesRequest, respond
from selfspec.serve.monitoring import LOGGER, JsonLines, RequestLog
from selfspec.serve.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Refusal,
    TokenizeRequest,
)
from selfspec.serve.served import Served
from selfspec.version import __version__

# What nginx calls a client that closed the request; nobody reads it but the log.
_CLIENT_LEFT = 499

_REFUSED: dict[int | str, dict[str, Any]] = {
    status: {"model": Refusal, "description": "Refused, and why"} for status in ("4XX", 503)
}

_INSTEAD = {
    "/v1/responses/": "responses are not stored; send the whole conversation to /v1/responses",
    "/v1/embeddings": "this server writes text; serve a model for embeddings elsewhere",
    "/v1/rerank": "this server writes text; serve a model for ranking elsewhere",
    "/v1/audio": "this server reads and writes text alone; transcribe by a pipeline, as docs/speech.md shows",
    "/v1/images": "this server reads and writes text alone",
    "/v1/moderations": "ask the model itself at /v1/chat/completions, with response_format",
    **dict.fromkeys(("/v1/files", "/v1/batches"), "nothing is stored; send requests one by one, many at once"),
    **dict.fromkeys(("/v1/assistants", "/v1/threads"), "nothing is stored; send all of it to /v1/chat/completions"),
    "/v1/complete": "ask /v1/messages or /v1/completions",
    "/api/": "ask /v1/chat/completions or /v1/completions",
    "/generate": "ask /v1/completions",
}

_LOGGERS = (LOGGER.name, "uvicorn.error")

# Longest that a request is finished in when its replica is taken away.
_STOP_SECONDS = 60.0

# The part of the time to stop in which answers may come to their end; in the rest they are given up, and written.
_OF_STOP_SECONDS = 0.9

# The status of a process that SIGINT ended.
_INTERRUPTED = 130


def create_app(
    served: Served, api_key: str | None = None, stop_seconds: float | None = 30.0, origins: Sequence[str] = ()
) -> FastAPI:
    """Make the application, whose engine starts and stops with it and ends running rows after `stop_seconds`.

    Requests below /v1 need `api_key`, if there is one; scripts of pages of `origins` ("*": of any) may ask.
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
    )
    app.include_router(_operation(served))
    reading = _reading(served)
    app.include_router(_models(served, reading))
    app.include_router(_tokens(served, reading))
    app.add_middleware(ClientPace, limits=served.limits, api_key=api_key)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RequestLog, responded=served.metrics.responded)
    _add_errors(app)
    return app


def _operation(served: Served) -> APIRouter:
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


class _ReadRequest(Request):
    """A request whose body was read into its model, which FastAPI takes for JSON that is right."""

    content: Any = None

    async def json(self) -> Any:
        return self.content


def _reading(served: Served) -> type[APIRoute]:
    """Make the kind of routes whose bodies are counted before they are read, and large ones read beside the loop."""

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            answer, field = super().get_route_handler(), self.body_field
            model: Any = None if field is None else field.field_info.annotation

            async def read(http: Request) -> Response:
                request = _ReadRequest(http.scope, http.receive)
                if model is not None and "json" in http.headers.get("content-type", "") and await request.body():
                    request.content = await served.parse(await request.body(), model)
                return await answer(request)

            return read

    return Route


def _models(served: Served, reading: type[APIRoute]) -> APIRouter:
    """Route the endpoints of OpenAI's and Anthropic's clients."""
    router = APIRouter(prefix="/v1", tags=["openai"], responses=_REFUSED, route_class=reading)

    def card(name: str) -> dict[str, Any]:
        more = {"created": served.created, "owned_by": "selfspec", "max_model_len": served.engine.longest}
        return {"id": name, "object": "model", "type": "model", "display_name": name, **more}

    @router.get("/models", summary="The model that is served")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in served.names]}

    @router.get("/models/{name:path}", summary="The model of a name")
    async def model(name: str) -> dict[str, Any]:
        if name not in served.names:
            raise unknown_model(name, served.name)
        return card(name)

    @router.post("/responses", summary="Answer items of a conversation, as OpenAI's newer clients ask")
    async def responses(http: Request, request: ResponsesRequest) -> Response:
        return await respond(served, http, request)

    @router.post("/messages", summary="Answer messages, as Anthropic's clients ask")
    async def messages(http: Request, request: MessagesRequest) -> Response:
        return await message(served, http, request)

    @router.post("/messages/count_tokens", summary="Count the tokens of messages")
    async def counted(http: Request, request: CountRequest) -> dict[str, Any]:
        return await count_tokens(served, http, request)

    @router.post("/completions", summary="Go on with text")
    async def completions(http: Request, request: CompletionRequest) -> Response:
        return await complete(served, http, request)

    @router.post("/chat/completions", summary="Answer messages")
    async def chat_completions(http: Request, request: ChatCompletionRequest) -> Response:
        return await chat(served, http, request)

    return router


def _tokens(served: Served, reading: type[APIRoute]) -> APIRouter:
    """Turn text to tokens, and tokens to text, as vLLM's clients ask."""
    router = APIRouter(tags=["tokens"], responses=_REFUSED, route_class=reading)

    def tokens_of(text: str, specials: bool) -> list[int]:
        served.check_text(text, "prompt")
        found: list[int] = served.tokenizer(text, add_special_tokens=specials).input_ids
        return found

    @router.post("/tokenize", summary="Text or messages to tokens")
    async def tokenize(http: Request, request: TokenizeRequest) -> dict[str, Any]:
        served.check(request.model or served.name)
        if request.messages is not None:
            _, work = await read_chat(served, http, lambda: {"model": served.name, "messages": request.messages})
            tokens = list(work.prompts[0])
        else:
            tokens = await served.read(lambda: tokens_of(request.prompt or "", request.add_special_tokens))
        texts = served.tokenizer.convert_ids_to_tokens(tokens) if request.return_token_strs else None
        most = served.engine.longest
        return {"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": texts}

    @router.post("/detokenize", summary="Tokens to text")
    async def detokenize(request: DetokenizeRequest) -> dict[str, str]:
        served.check(request.model or served.name)
        if len(request.tokens) > served.engine.longest:
            said = f"tokens: there are {len(request.tokens)}, and the context has {served.engine.longest}"
            raise ApiError(400, said, "tokens", "context_length_exceeded")
        served.check_tokens(request.tokens, "tokens", served.readable)
        return {"prompt": await served.read(lambda: str(served.tokenizer.decode(request.tokens)))}

    return router


def _add_errors(app: FastAPI) -> None:
    """Write every refusal and failure in OpenAI's form."""

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        found = validation_error(error.errors())
        return JSONResponse(found.body, found.status)

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> JSONResponse:
        hint = next((said for path, said in _INSTEAD.items() if request.url.path.startswith(path)), None)
        missing = error.status_code == 404 and hint is not None
        found = ApiError(
            error.status_code, f"{request.url.path} is not there: {hint}" if missing else str(error.detail)
        )
        return JSONResponse(found.body, error.status_code, error.headers)

    @app.exception_handler(ClientLeftError)
    async def left(_: Request, __: ClientLeftError) -> Response:
        return Response(status_code=_CLIENT_LEFT)


def listen(host: str, port: int) -> socket.socket:
    """Bind an address, before a model is loaded for it; port 0 is any free one."""
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
    """Serve on what `listen` bound, and call `ready` once requests are taken.

    SIGTERM or SIGINT: take no more requests, finish those that run, and end the process within `stop_seconds`, whatever
    still runs; a second SIGINT ends it at once.
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
        h11_max_incomplete_event_size=HEADER_BYTES,
    )
    with _signals_that_end_well(), _json_log(), bound:
        _Server(config, served, stop_seconds, ready).run([bound])


class _Server(uvicorn.Server):
    """Tells when it is ready; once it is told to stop, it refuses requests, and the process ends in time."""

    def __init__(self, config: uvicorn.Config, served: Served, stop_seconds: float, ready: Callable[[], None]) -> None:
        super().__init__(config)
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
        if not self.should_exit:
            self._told.set()
        super().handle_exit(sig, frame)

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


@contextmanager
def _signals_that_end_well() -> Iterator[None]:
    """Swallow the signals that uvicorn sends itself again after it was stopped by them."""
    kept = {kind: signal.signal(kind, lambda *_: None) for kind in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for kind, handler in kept.items():
            signal.signal(kind, handler)


@contextmanager
def _json_log() -> Iterator[None]:
    """Log lines of JSON to stderr."""
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


if TYPE_CHECKING:
    from ray.serve import Application


@dataclass(frozen=True)
class Replicas:
    """A deployment of an application, for Ray Serve. Ray has the queue, the balancer and the health checks.

    A replica that dies takes the requests with it that it was answering: the client gets an error of the connection or
    a 5xx, and sends them again, as OpenAI's client does by itself (`max_retries`). Ray gives them to another replica,
    and starts a new one. Answers that are seeded or greedy come again as they were.

    Attributes:
        build: makes the application in each replica; loads the model there. It is pickled by Ray, so it should be a
            function of an importable module, or refer to nothing large.
        least: replicas that always run.
        most: replicas that run when requests wait.
        requests: that a replica should answer at once; more replicas are started when there are more.
        most_requests: that Ray sends to a replica at once; what exceeds that waits in Ray's own queue.
        resources: of each replica, as Ray's `ray_actor_options`, e.g. {"num_cpus": 4, "num_gpus": 1}.
    """

    build: Callable[[], Any]
    least: int = 1
    most: int = 2
    requests: int = 8
    most_requests: int = 64
    resources: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        whole = all(type(each) is int for each in (self.least, self.most, self.requests, self.most_requests))
        if not whole or not 1 <= self.least <= self.most or not 1 <= self.requests <= self.most_requests:
            raise UnsupportedOptionError(
                "replicas need 1 <= least <= most and 1 <= requests <= most_requests, got "
                f"{self.least!r}, {self.most!r}, {self.requests!r} and {self.most_requests!r}"
            )

    def bound(self) -> Application:
        """Make the application that `ray.serve.run` takes.

        Raises:
            UnsupportedOptionError: Ray Serve is not installed.
        """
        try:
            from ray import serve
        except ImportError as error:
            raise UnsupportedOptionError(
                "replicas are run by Ray Serve, which is not installed: pip install 'selfspec[ray]'"
            ) from error
        deployment = serve.deployment(
            serve.ingress(self.build)(),
            autoscaling_config={
                "min_replicas": self.least,
                "max_replicas": self.most,
                "target_ongoing_requests": self.requests,
            },
            max_ongoing_requests=self.most_requests,
            health_check_period_s=2.0,
            health_check_timeout_s=30.0,
            graceful_shutdown_timeout_s=_STOP_SECONDS,
            ray_actor_options=dict(self.resources or {}),
        )
        return deployment.bind()
