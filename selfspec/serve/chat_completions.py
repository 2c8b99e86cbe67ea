"""`POST /v1/chat/completions`: messages to answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from selfspec.errors import PromptError
from selfspec.serve.answering import NewPiece
from selfspec.serve.api_error import ApiError, api_error
from selfspec.serve.choice import ScoredToken
from selfspec.serve.completions import finite
from selfspec.serve.endpoint import Body, begun, finished, row_requests, streamed, usage
from selfspec.serve.request_log import note, request_id
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
    note(http.scope, prompt_tokens=len(prompt))
    if served.log_text:
        note(http.scope, messages=[message.model_dump(exclude_none=True) for message in request.messages])
    served.metrics.prompt_tokens.observe(len(prompt))
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    top = (request.top_logprobs or 0) if request.logprobs else None
    rows = await served.read(
        lambda: row_requests(served, request, [prompt], asked, top, "messages"), request.response_format is not None
    )
    head: Body = {
        "id": f"chatcmpl-{request_id(http.scope)}",
        "object": "chat.completion.chunk" if request.stream else "chat.completion",
        "created": served.created_now(),
        "model": served.name,
    }
    answering = await begun(served, request, rows)
    if request.stream:
        opening = [_chunk(index, {"role": "assistant", "content": ""}) for index in range(len(rows))]

        def chunk(new: NewPiece) -> Body:
            logprobs = None if top is None else _logprobs(served.texts, new.piece.scored)
            said = {"content": new.piece.text} if new.piece.text else {}
            return _chunk(new.index, said, logprobs, new.piece.finish_reason)

        return streamed(served, http, request, answering, len(prompt), head, opening, chunk)
    await finished(served, http, answering)
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None if top is None else _logprobs(served.texts, choice.scored),
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(answering.choices)
    ]
    return JSONResponse({**head, "choices": choices, "usage": usage(len(prompt), answering)})


def _prompt(served: Served, request: ChatCompletionRequest) -> tuple[int, ...]:
    """Token ids of the conversation."""
    if served.template is None:
        raise ApiError(
            400,
            "this model has no chat template; start the server with --template FILE, or ask /v1/completions",
            "messages",
            "no_chat_template",
        )
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
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    plain.setdefault("content", "")
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
