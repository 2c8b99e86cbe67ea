"""The application: OpenAI's endpoints, and those that operators ask."""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from selfspec.serve.api_error import ApiError, unknown_model, validation_error
from selfspec.serve.chat_completions import chat
from selfspec.serve.client_limits import ClientPace
from selfspec.serve.completions import complete
from selfspec.serve.endpoint import ClientLeftError
from selfspec.serve.request_log import LOGGER, RequestLog
from selfspec.serve.schemas import ChatCompletionRequest, CompletionRequest, Refusal
from selfspec.serve.served import Served
from selfspec.version import __version__

# What nginx calls a client that closed the request; nobody reads it but the log.
_CLIENT_LEFT = 499


def create_app(served: Served, api_key: str | None = None, stop_seconds: float | None = 30.0) -> FastAPI:
    """Make the application. Its engine starts and stops with it.

    Args:
        served: the model.
        api_key: that requests below /v1 must have; None: anybody may ask.
        stop_seconds: that running rows have when it stops; None: any time.
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
    app.include_router(_models(served), dependencies=[Depends(_key_check(api_key))])
    app.add_middleware(ClientPace, limits=served.limits)
    app.add_middleware(RequestLog, responded=served.metrics.responded)
    _add_errors(app)
    return app


def _operation(served: Served) -> APIRouter:
    """What operators ask: is it alive, does it take requests, how is it doing."""
    router = APIRouter(tags=["operation"])

    @router.get("/health", summary="Whether the engine lives")
    async def health() -> JSONResponse:
        alive = served.engine.running or served.stopping
        return JSONResponse({"status": "ok" if alive else "the engine broke"}, 200 if alive else 503)

    @router.get("/ready", summary="Whether requests are taken")
    async def ready() -> JSONResponse:
        taken = served.engine.running and not served.stopping
        return JSONResponse({"status": "ready" if taken else "stopping"}, 200 if taken else 503)

    @router.get("/metrics", summary="Metrics for Prometheus")
    async def metrics() -> Response:
        return Response(served.metrics.written(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def _models(served: Served) -> APIRouter:
    """OpenAI's endpoints."""
    refused: dict[str, Any] = {"model": Refusal, "description": "Refused, and why"}
    router = APIRouter(prefix="/v1", tags=["openai"], responses={"4XX": refused, 503: refused})
    card = {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "selfspec",
        "max_model_len": served.engine.longest,
    }

    @router.get("/models", summary="The model that is served")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @router.get("/models/{name:path}", summary="The model of a name")
    async def model(name: str) -> dict[str, Any]:
        if name != served.name:
            raise unknown_model(name, served.name)
        return card

    @router.post("/completions", summary="Go on with text")
    async def completions(http: Request, request: CompletionRequest) -> Response:
        return await complete(served, http, request)

    @router.post("/chat/completions", summary="Answer messages")
    async def chat_completions(http: Request, request: ChatCompletionRequest) -> Response:
        return await chat(served, http, request)

    return router


def _key_check(api_key: str | None) -> Any:
    """Refuses requests without the key."""

    async def check(http: Request) -> None:
        if api_key is None:
            return
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), api_key.encode()):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
                None,
                "invalid_api_key",
                {"WWW-Authenticate": "Bearer"},
            )

    return check


def _add_errors(app: FastAPI) -> None:
    """Every refusal and failure in OpenAI's form."""

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        found = validation_error(error.errors())
        return JSONResponse(found.body, found.status)

    @app.exception_handler(HTTPException)
    async def of_http(_: Request, error: HTTPException) -> JSONResponse:
        found = ApiError(error.status_code, str(error.detail))
        return JSONResponse(found.body, error.status_code, error.headers)

    @app.exception_handler(ClientLeftError)
    async def left(_: Request, __: ClientLeftError) -> Response:
        return Response(status_code=_CLIENT_LEFT)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        LOGGER.log(logging.ERROR, "a request failed", exc_info=error)
        found = ApiError(500, "the server failed at this request; its log says why")
        return JSONResponse(found.body, 500)
