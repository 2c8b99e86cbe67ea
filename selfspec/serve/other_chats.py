"""What the other chat APIs share: their requests are read into one chat, and their answers are items of one of it."""

from __future__ import annotations

import re
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from selfspec.serve.answering import NewPiece
from selfspec.serve.api_error import ApiError, validation_error
from selfspec.serve.call_reader import ToolCall
from selfspec.serve.chat_completions import chat_work
from selfspec.serve.choice import Counts
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
        own = error.param or ""
        error.param = renamed.get(own, error.param)
        for name, here in renamed.items():
            # Some are words of English, too.
            if name == own or "_" in name:
                error.message = re.sub(rf"\b{name}\b", here, error.message)
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


class ItemsForm(Form):
    """The form of an answer that is written as items in order: one for text, and one for each call."""

    def __init__(self) -> None:
        # Of the item that is written; None: none is.
        self._open: ToolCall | Literal["text"] | None = None

    def piece(self, new: NewPiece, counts: Counts) -> Iterable[str]:
        """Write what is new, and the items that begin and end with it."""
        if new.piece.text:
            if self._open != "text":
                yield from self.closed()
                self._open = "text"
                yield from self.opened(None)
            yield from self.grown(new.piece.text, None)
        for each in new.piece.calls:
            if each.begins:
                yield from self.closed()
                self._open = each.call
                yield from self.opened(each.call)
            if each.arguments:
                yield from self.grown(each.arguments, each.call)
            if each.ends:
                yield from self.closed()

    def closed(self) -> Iterable[str]:
        """Write the end of the item that is open."""
        now, self._open = self._open, None
        if now is not None:
            yield from self.finished(None if now == "text" else now)

    @abstractmethod
    def opened(self, call: ToolCall | None) -> Iterable[str]:
        """Write the beginning of a call, or of a text."""

    @abstractmethod
    def grown(self, new: str, call: ToolCall | None) -> Iterable[str]:
        """Write what is new of a call's arguments, or of a text."""

    @abstractmethod
    def finished(self, call: ToolCall | None) -> Iterable[str]:
        """Write the end of a call, or of a text."""


def text_of(content: Any) -> str:
    """The text of a content in one piece: of a text, of parts with texts, or of nothing."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def called(id_: str, name: str, arguments: str) -> Body:
    """A call of an earlier answer, as chats have it."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def new_id(kind: str) -> str:
    """An id for an item of this kind."""
    return f"{kind}_{uuid.uuid4().hex[:24]}"
