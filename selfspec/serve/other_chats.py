"""What the other chat APIs share: their requests are read into one chat, and their answers are items of one of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from selfspec.serve.api_error import ApiError, validation_error
from selfspec.serve.chat_completions import chat_work
from selfspec.serve.endpoint import Body, Form, Work, answer, row_requests
from selfspec.serve.schemas import ChatCompletionRequest
from selfspec.serve.served import Served


async def answer_as(
    served: Served, http: Request, fields: Mapping[str, Any], renamed: Mapping[str, str], form: Callable[[Work], Form]
) -> Response:
    """Answer a chat in another form.

    Args:
        served: the model.
        http: the request.
        fields: of a chat request; those that are None are left out.
        renamed: what its fields are called in this API, where a refusal names them.
        form: writes the answer.

    Raises:
        ApiError: it is refused, or failed.
    """
    try:
        request, work = await read_chat(served, http, fields)
        rows = await row_requests(served, http, request, work)
        return await answer(served, http, request, work, rows, form(work))
    except ApiError as error:
        error.param = renamed.get(error.param or "", error.param)
        raise


async def read_chat(served: Served, http: Request, fields: Mapping[str, Any]) -> tuple[ChatCompletionRequest, Work]:
    """Read fields of a chat request into what the engine has to do.

    Raises:
        ApiError: it is refused.
    """
    try:
        given = {name: value for name, value in fields.items() if value is not None}
        request = ChatCompletionRequest.model_validate(given)
    except ValidationError as error:
        raise validation_error(error.errors()) from error
    return request, await chat_work(served, http, request)


def text_of(content: Any) -> str:
    """The text of a content in one piece: of a text, of parts with texts, or of nothing."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def called(id_: str, name: str, arguments: str) -> Body:
    """A call of an earlier answer, as chats have it."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def new_id(kind: str) -> str:
    """An id for an item of this kind."""
    return f"{kind}_{uuid.uuid4().hex[:24]}"
