"""`POST /v1/chat/completions`: messages to answer."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from selfspec.errors import PromptError
from selfspec.serve.answering import NewPiece
from selfspec.serve.api_error import ApiError, api_error
from selfspec.serve.choice import Choice, ScoredToken
from selfspec.serve.completions import finite
from selfspec.serve.endpoint import Body, Form, answer, note_prompts, row_requests
from selfspec.serve.request_log import request_id
from selfspec.serve.schemas import ChatCompletionRequest, Message
from selfspec.serve.served import Served
from selfspec.serve.token_texts import TokenTexts


async def chat(served: Served, http: Request, request: ChatCompletionRequest) -> Response:
    """Answer a request.

    Raises:
        ApiError: it is refused, or failed.
    """
    served.check(request.model)
    prompt = await served.read(lambda: _prompt(served, request))
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    note_prompts(served, http, [prompt], messages=messages)
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    top = (request.top_logprobs or 0) if request.logprobs else None
    rows = await row_requests(served, http, request, [prompt], asked, top, "messages")
    head: Body = {
        "id": f"chatcmpl-{request_id(http.scope)}",
        "object": "chat.completion.chunk" if request.stream else "chat.completion",
        "created": int(time.time()),
        "model": served.name,
    }

    def logprobs(scored: Sequence[ScoredToken]) -> Body | None:
        return None if top is None else _logprobs(served.texts, scored)

    def chunk(new: NewPiece) -> Body:
        said = {"content": new.piece.text} if new.piece.text else {}
        return _chunk(new.index, said, logprobs(new.piece.scored), new.piece.finish_reason)

    def whole(index: int, choice: Choice) -> Body:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        reason = choice.finish_reason
        return {"index": index, "message": message, "logprobs": logprobs(choice.scored), "finish_reason": reason}

    opening = [_chunk(index, {"role": "assistant", "content": ""}) for index in range(len(rows))]
    return await answer(served, http, request, rows, len(prompt), Form(head, opening, chunk, whole))


def _prompt(served: Served, request: ChatCompletionRequest) -> tuple[int, ...]:
    """Token ids of the conversation."""
    if served.template is None:
        raise ApiError(
            400,
            "this model has no chat template; start the server with --template FILE, or ask /v1/completions",
            "messages",
            "no_chat_template",
        )
    if len(request.messages) > served.engine.longest:
        raise ApiError(
            400, "there are more messages than the context has tokens", "messages", "context_length_exceeded"
        )
    served.check_text("".join(message.text for message in request.messages), "messages")
    tools = None
    if request.tools and request.tool_choice != "none":
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
    try:
        return tuple(served.template.prompt([_plain(message) for message in request.messages], tools))
    except PromptError as error:
        raise api_error(error, "messages") from error


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates read it: text in one piece, and arguments of calls as objects."""
    plain = message.model_dump(include={"role", "content", "name", "tool_calls", "tool_call_id"}, exclude_none=True)
    if plain["role"] == "developer":
        plain["role"] = "system"
    plain["content"] = message.text
    for call in plain.get("tool_calls", ()):
        try:
            # Clients write nothing where a function takes nothing.
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        except ValueError as error:
            raise PromptError(f"tool_calls: arguments of {call['function']['name']!r} are not JSON") from error
    return plain


def _chunk(index: int, delta: Body, logprobs: Body | None = None, reason: str | None = None) -> Body:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(texts: TokenTexts, scored: Sequence[ScoredToken]) -> Body:
    """Log-probabilities in the form that chats have."""

    def one(token: int, logprob: float) -> Body:
        return {"token": texts.text(token), "logprob": finite(logprob), "bytes": list(texts.raw(token))}

    content = [
        {
            **one(each.token, each.logprobs.logprob),
            "top_logprobs": [one(token, value) for token, value in each.logprobs.top],
        }
        for each in scored
    ]
    return {"content": content, "refusal": None}
