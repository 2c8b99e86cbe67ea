"""Refusals and failures as OpenAI's clients read them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from selfspec.errors import EngineStoppedError, PromptError, QueueFullError, SelfSpecError, UnsupportedOptionError

RETRY_AFTER = 1
"""Seconds after which a request that found the queue full may come again."""


class ApiError(Exception):
    """An answer that is no completion: an HTTP status, what is wrong with which field, and a code for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def response(self, path: str) -> JSONResponse:
        """Make the answer that is sent to who asked for a path; clients of Ollama read the message alone."""
        body = {"error": self.message} if path.startswith("/api/") else self.body
        return JSONResponse(body, self.status, self.headers)

    @property
    def body(self) -> dict[str, Any]:
        """Its body."""
        kinds = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = kinds.get(self.status, default)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        # Anthropic's clients look for the type of the whole.
        return {"type": "error", "error": error}


def stopping_error() -> ApiError:
    """Say that the server takes no more requests."""
    return ApiError(503, "the server is stopping; send the request to another one, or later", None, "stopping")


def unknown_model(asked: str, served: str) -> ApiError:
    """Say that a model is not served here."""
    message = f"there is no model {asked[:200]!r} here; ask for {served!r}"
    return ApiError(404, message, "model", "model_not_found")


def api_error(error: SelfSpecError, param: str | None = None) -> ApiError:
    """Turn a typed error of the engine into what a client reads, about the field `param` where it names none."""
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), None, "queue_full", {"Retry-After": str(RETRY_AFTER)})
    if isinstance(error, EngineStoppedError):
        return stopping_error()
    if isinstance(error, PromptError):
        return ApiError(400, str(error), param, "context_length_exceeded" if "context" in str(error) else None)
    if isinstance(error, UnsupportedOptionError):
        return ApiError(400, str(error), _named(str(error)) or param)
    return ApiError(500, str(error))


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Say what pydantic found wrong, by the field that is deepest in it."""
    # Of a field with several forms, the form that went furthest says most.
    deepest = max(errors, key=lambda error: len(error["loc"]))
    place = [*map(str, deepest["loc"]), *([deepest["ctx"]["name"]] if deepest["type"] == "only" else [])]
    message = str(deepest["msg"]).removeprefix("Value error, ")
    message = re.sub(r" (found )?using (discriminator )?\S+\(\)", "", message)
    field = place[0] if place else _named(message)
    if deepest["type"] == "extra_forbidden":
        return ApiError(400, f"unrecognized request argument: {'.'.join(place)}", field, "unknown_argument")
    if not place:
        return ApiError(400, message, field)
    return ApiError(400, f"{'.'.join(place)}: {message}", field)


def _named(message: str) -> str | None:
    """Return the field that a message begins with."""
    word = message.replace("=", " ").replace(":", " ").partition(" ")[0]
    return word if word.replace("_", "").isalpha() and word.islower() else None
