"""`POST /v1/responses`: the chat of OpenAI's newer clients, who bring the conversation or name an answer in it."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from selfspec.serve.api_error import ApiError
from selfspec.serve.chat.call_reader import ToolCall
from selfspec.serve.choice import Choice, Counts
from selfspec.serve.endpoints.answering import Body, Form, Work, event
from selfspec.serve.endpoints.chat_completions import Item, ItemsForm, answer_as, called, function, new_id
from selfspec.serve.schemas import (
    HINTS,
    Content,
    Function,
    JsonSchema,
    Many,
    Part,
    StreamOptions,
    Strict,
    in_one_piece,
)
from selfspec.serve.served import Served


class InputItem(Part):
    """A message of the conversation, what an answer thought, a call that it made, or what that gave."""

    kinds: ClassVar = {
        "message": "role content",
        "function_call": "call_id name arguments",
        "function_call_output": "call_id output",
        "reasoning": "content?",
    }
    hints = Part.hints | {"id", "status", "phase", "summary", "encrypted_content"}
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant", ""] = ""
    content: Content = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: Content = ""


class ResponseTool(Function):
    """A function that the model may call, or calls."""

    type: Literal["function"]


# What OpenAI's server runs, or only its models know how to call. Codex brings them along; nobody has to call any.
_ELSEWHERE = ("web_search", "image_generation", "namespace", "tool_search")


def _that_are_known(tools: Any) -> Any:
    """Leave out tools that the model cannot be told of."""
    if not isinstance(tools, list):
        return tools
    return [tool for tool in tools if not (isinstance(tool, dict) and tool.get("type") in _ELSEWHERE)]


class ResponseTextFormat(JsonSchema):
    """What the text fits."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(None, alias="schema")  # type: ignore[assignment]


class ResponseText(Strict):
    """How the text is written."""

    hints = frozenset({"verbosity"})
    format: ResponseTextFormat | None = None


class ResponsesRequest(Strict):
    """`POST /v1/responses`."""

    hints = HINTS - {"metadata", "store", "user"} | {"client_metadata"}
    only: ClassVar = {"background": False, "truncation": "disabled"}
    renamed: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text",
    }
    model: str
    input: str | Annotated[Many[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    text: ResponseText | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[Many[ResponseTool] | None, BeforeValidator(_that_are_known)] = None
    tool_choice: Literal["none", "auto", "required"] | ResponseTool | None = None
    parallel_tool_calls: bool | None = None
    # How much the model thinks, where its template reads that; the rest hints at how it is shown and kept.
    reasoning: dict[Literal["effort", "summary", "context"], str | None] | None = None
    previous_response_id: str | None = None
    include: Many[Literal["reasoning.encrypted_content"]] | None = None
    # These come back.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    user: str | None = None

    @property
    def items(self) -> list[InputItem]:
        """The input, of which a text is a message of the user."""
        return [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def chat(self, reads: Collection[str]) -> Body:
        chosen = self.tool_choice
        tools = [function(tool.model_dump(exclude={"type"}, exclude_none=True)) for tool in self.tools or ()]
        return {
            **self.model_dump(include={"model", "temperature", "top_p", "seed", "stream", "parallel_tool_calls"}),
            "messages": _messages(self.instructions, self.items),
            "max_tokens": self.max_output_tokens,
            "tools": tools or None,
            "tool_choice": function({"name": chosen.name}) if isinstance(chosen, ResponseTool) else chosen,
            "response_format": _format(self.text),
            "reasoning_effort": (self.reasoning or {}).get("effort"),
        }

    def form(self, served: Served, work: Work) -> Form:
        return ResponseForm(served, self, work)


async def respond(served: Served, http: Request, request: ResponsesRequest) -> Response:
    """Answer a request, behind the conversation of the answer that it names."""
    before = request.previous_response_id
    if before is not None:
        kept = served.stored.get(before)
        if kept is None:
            said = f"previous_response_id: {before[:100]!r} is not kept here, or no longer; send the whole conversation"
            raise ApiError(400, said, "previous_response_id", "previous_response_not_found")
        served.stored.move_to_end(before)
        request.input = [*await served.read(lambda: [*map(InputItem.model_validate, json.loads(kept))]), *request.items]
    return await answer_as(served, http, request)


def _format(text: ResponseText | None) -> Body | None:
    if text is None or text.format is None:
        return None
    said = text.format.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
    return {"type": text.format.type, **({"json_schema": said} if text.format.type == "json_schema" else {})}


def _messages(instructions: str | None, items: Sequence[InputItem]) -> list[Body]:
    """Write the conversation as chats have it: calls belong to the message before them."""
    messages: list[Body] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in items:
        if item.type == "message" and item.role == "assistant" and "reasoning_content" in (messages or [{}])[-1]:
            messages[-1]["content"] += in_one_piece(item.content)
        elif item.type == "message":
            messages.append({"role": item.role, "content": in_one_piece(item.content)})
        elif item.type == "reasoning":
            thought = in_one_piece(item.content)
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
        elif item.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": in_one_piece(item.output)})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(called(item.call_id, item.name, item.arguments))
    return messages


# What a response says of a request that says nothing of it.
_UNSAID: Body = {
    **dict.fromkeys(("instructions", "max_output_tokens", "temperature", "top_p", "user", "previous_response_id")),
    "metadata": {},
    "parallel_tool_calls": False,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
}


class ResponseForm(ItemsForm):
    """A response: items in order, a message for text and one for each call."""

    def __init__(self, served: Served, request: ResponsesRequest, work: Work) -> None:
        super().__init__()
        self._served, self._request, self._prompt_tokens = served, request, work.prompt_tokens
        self._head: Body = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": served.name,
            **_UNSAID,
            **request.model_dump(by_alias=True, exclude_none=True, include=set(_UNSAID)),
            "truncation": "disabled",
            "error": None,
        }
        self._output: list[Body] = []
        self._sent = 0

    def whole(self, choices: Sequence[Choice], counts: Counts) -> Body:
        choice = choices[0]
        said = [_thought(choice.thought)] if choice.thought else []
        said += [_message(choice.text)] if choice.text or not choice.calls else []
        return self._response([*said, *map(_called, choice.calls)], choice, counts)

    def begin(self) -> Iterable[str]:
        begun = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        return [self._event("response.created", response=begun), self._event("response.in_progress", response=begun)]

    def end(self, choices: Sequence[Choice], counts: Counts) -> Iterable[str]:
        yield from self.closed()
        whole = self._response(self._output, choices[0], counts)
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: ApiError) -> Iterable[str]:
        said = {"code": error.code or "server_error", "message": error.message}
        yield self._event("error", **said, param=error.param)
        broken = {**self._head, "status": "failed", "output": self._output, "error": said, "usage": None}
        yield self._event("response.failed", response=broken)

    def opened(self, item: Item) -> Iterable[str]:
        if isinstance(item, ToolCall):
            self._output.append({**_called(ToolCall(item.name, "", item.id)), "status": "in_progress"})
            yield self._item("response.output_item.added")
        else:
            begun = _message("") if item == "text" else _thought("")
            self._output.append({**begun, "status": "in_progress"})
            yield self._item("response.output_item.added", content=[])
            yield self._part("response.content_part.added", part=begun["content"][0])

    def grown(self, new: str, item: Item) -> Iterable[str]:
        if isinstance(item, ToolCall):
            yield self._event("response.function_call_arguments.delta", **self._where, delta=new)
        else:
            part = self._output[-1]["content"][0]
            part["text"] += new
            yield self._part(f"response.{part['type']}.delta", delta=new, logprobs=[])

    def finished(self, item: Item) -> Iterable[str]:
        now = self._output[-1]
        now["status"] = "completed"
        if not isinstance(item, ToolCall):
            part = now["content"][0]
            yield self._part(f"response.{part['type']}.done", text=part["text"], logprobs=[])
            yield self._part("response.content_part.done", part=part)
        else:
            now["arguments"] = item.arguments
            done = {"name": item.name, "arguments": item.arguments}
            yield self._event("response.function_call_arguments.done", **self._where, **done)
        yield self._item("response.output_item.done")

    @property
    def _where(self) -> Body:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _item(self, name: str, **changed: Any) -> str:
        return self._event(name, output_index=len(self._output) - 1, item={**self._output[-1], **changed})

    def _part(self, name: str, **fields: Any) -> str:
        return self._event(name, **self._where, content_index=0, **fields)

    def _event(self, kind: str, /, **fields: Any) -> str:
        self._sent += 1
        return event({"type": kind, "sequence_number": self._sent - 1, **fields}, kind)

    def _response(self, output: list[Body], choice: Choice, counts: Counts) -> Body:
        cut = choice.finish_reason == "length"
        if self._head["store"]:
            said = [item.model_dump(exclude_unset=True) for item in self._request.items]
            stored, most = self._served.stored, self._served.limits.stored_bytes
            stored[self._head["id"]] = json.dumps([*said, *output])
            while sum(map(len, stored.values())) > most:
                stored.popitem(last=False)
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": {
                "input_tokens": self._prompt_tokens,
                "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
                "output_tokens": counts.tokens,
                "output_tokens_details": {"reasoning_tokens": counts.thought},
                "total_tokens": self._prompt_tokens + counts.tokens,
            },
        }


def _message(text: str) -> Body:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "id": new_id("msg"), "status": "completed", "role": "assistant", "content": content}


def _thought(text: str) -> Body:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": new_id("rs"), "status": "completed", "summary": [], "content": content}


def _called(call: ToolCall) -> Body:
    what = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
    return {"type": "function_call", "id": new_id("fc"), "status": "completed", **what}
