"""`POST /v1/completions`: text to go on with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from selfspec.decode.rows.logprobs import TokenLogprobs
from selfspec.decode.text_stream import continuation
from selfspec.serve.answering import NewPiece
from selfspec.serve.choice import ScoredToken
from selfspec.serve.generation import Body, begun, finished, row_requests, streamed, usage
from selfspec.serve.request_log import note, request_id
from selfspec.serve.schemas import CompletionRequest
from selfspec.serve.served import Served
from selfspec.serve.token_texts import TokenTexts

DEFAULT_TOKENS = 16


async def complete(served: Served, http: Request, request: CompletionRequest) -> Response:
    """Answer a request.

    Raises:
        ApiError: it is refused, or failed.
    """
    served.check(request.model)
    prompts = await served.read(lambda: _prompts(served, request))
    prompt_tokens = sum(map(len, prompts))
    note(http.scope, prompt_tokens=prompt_tokens)
    if served.log_text:
        note(http.scope, prompts=request.prompt)
    for prompt in prompts:
        served.metrics.prompt_tokens.observe(len(prompt))
    asked = _asked(served, request, prompts)
    rows = await served.read(
        lambda: row_requests(served, request, prompts, asked or 1, request.logprobs, "prompt"),
        request.response_format is not None,
    )
    head: Body = {
        "id": f"cmpl-{request_id(http.scope)}",
        "object": "text_completion",
        "created": served.created_now(),
        "model": served.name,
    }
    if request.max_tokens == 0:
        choices = [
            await _choice(served, request, index, row.input_ids, "", [], "length") for index, row in enumerate(rows)
        ]
        return JSONResponse({**head, "choices": choices, "usage": usage(prompt_tokens, None)})
    answering = await begun(served, request, rows)
    if request.stream:
        offsets = [0] * len(rows)

        def chunk(new: NewPiece) -> Body:
            logprobs = None
            if request.logprobs is not None:
                logprobs = _logprobs(served.texts, new.piece.scored, offsets[new.index])
                offsets[new.index] += sum(len(served.texts.text(each.token)) for each in new.piece.scored)
            return {
                "index": new.index,
                "text": new.piece.text,
                "logprobs": logprobs,
                "finish_reason": new.piece.finish_reason,
            }

        return streamed(served, http, request, answering, prompt_tokens, head, (), chunk)
    await finished(served, http, answering)
    choices = [
        await _choice(served, request, index, row.input_ids, choice.text, choice.scored, choice.finish_reason)
        for index, (row, choice) in enumerate(zip(rows, answering.choices, strict=True))
    ]
    return JSONResponse({**head, "choices": choices, "usage": usage(prompt_tokens, answering)})


def _prompts(served: Served, request: CompletionRequest) -> list[tuple[int, ...]]:
    """Token ids of each prompt."""
    given: Any = request.prompt
    if isinstance(given, str) or isinstance(given[0], int):
        given = [given]
    return [
        tuple(map(int, served.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt)) for prompt in given
    ]


def _asked(served: Served, request: CompletionRequest, prompts: Sequence[tuple[int, ...]]) -> int:
    """New tokens of an answer: by default few, and no more than there is room for."""
    if request.max_tokens is not None:
        return request.max_tokens
    room = served.context - max(map(len, prompts))
    return max(min(DEFAULT_TOKENS, room, served.limits.new_tokens or DEFAULT_TOKENS), 1)


async def _choice(
    served: Served,
    request: CompletionRequest,
    index: int,
    prompt: Sequence[int],
    text: str,
    scored: Sequence[ScoredToken],
    reason: str | None,
) -> Body:
    logprobs = None if request.logprobs is None else _logprobs(served.texts, scored, 0)
    if request.echo:
        before = continuation(served.tokenizer, (), prompt)
        text = before + text
        if request.logprobs is not None:
            of_prompt = await served.score(prompt, request.logprobs)
            read = [ScoredToken(token, found) for token, found in zip(prompt[1:], of_prompt, strict=True)]
            logprobs = _logprobs(served.texts, [*read, *scored], len(served.texts.text(prompt[0])))
            logprobs = {
                "text_offset": [0, *logprobs["text_offset"]],
                "token_logprobs": [None, *logprobs["token_logprobs"]],
                "tokens": [served.texts.text(prompt[0]), *logprobs["tokens"]],
                "top_logprobs": [None, *logprobs["top_logprobs"]],
            }
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(texts: TokenTexts, scored: Sequence[ScoredToken], offset: int) -> Body:
    """Log-probabilities in the form that completions have."""
    found: Body = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for each in scored:
        text = texts.text(each.token)
        found["text_offset"].append(offset)
        found["tokens"].append(text)
        found["token_logprobs"].append(finite(each.logprobs.logprob))
        found["top_logprobs"].append(_top(texts, text, each.logprobs))
        offset += len(text)
    return found


def _top(texts: TokenTexts, own: str, logprobs: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens by their text, and the chosen one. Of tokens of equal text the likeliest is kept."""
    top: dict[str, float] = {}
    for token, value in logprobs.top:
        top.setdefault(texts.text(token), finite(value))
    top.setdefault(own, finite(logprobs.logprob))
    return top


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold, as OpenAI writes it for tokens that cannot be."""
    return max(logprob, -9999.0)
