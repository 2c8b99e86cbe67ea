"""`POST /v1/completions` continues text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from selfspec.serve.choice import Choice, Counts, Piece, ScoredToken
from selfspec.serve.endpoints.answering import (
    Body,
    ChoicesForm,
    Work,
    answer,
    finite,
    head_of,
    note_prompts,
    row_requests,
    unless_gone,
    usage,
)
from selfspec.serve.schemas import CompletionRequest
from selfspec.serve.served import Served, TokenTexts, prompt_text

DEFAULT_TOKENS = 16


@dataclass(frozen=True)
class _Echo:
    """What comes before an answer: its prompt and the log-probabilities of its tokens, where each is asked for."""

    text: str = ""
    logprobs: Body | None = None


async def complete(served: Served, http: Request, request: CompletionRequest) -> Response:
    """Answer a request, with few tokens where it says nothing else."""
    work = await completion_work(served, http, request, DEFAULT_TOKENS)
    rows, given, prompts = await row_requests(served, http, request, work), _given(request), work.prompts
    head = head_of(served, http, "cmpl", "text_completion")
    of_prompts = [
        await unless_gone(http, _echo(served, request, each, ids)) for each, ids in zip(given, prompts, strict=True)
    ]
    # One for each of the n answers to a prompt.
    echoes = [echo for echo in of_prompts for _ in range(len(rows) // len(prompts))]
    if request.max_tokens == 0:
        choices = [_choice(index, echo.text, echo.logprobs, "length") for index, echo in enumerate(echoes)]
        return JSONResponse({**head, "choices": choices, "usage": usage(work.prompt_tokens, Counts())})

    def logprobs(scored: Sequence[ScoredToken], echo: _Echo) -> Body | None:
        return None if request.logprobs is None else _logprobs(served.texts, scored, len(echo.text))

    def chunk(index: int, new: Piece) -> Body:
        return _choice(index, new.text, logprobs(new.scored, echoes[index]), new.finish_reason)

    def whole(index: int, choice: Choice) -> Body:
        echo = echoes[index]
        scored = _joined(echo.logprobs, logprobs(choice.scored, echo))
        return _choice(index, echo.text + choice.text, scored, choice.finish_reason)

    opening = [_choice(index, echo.text, echo.logprobs, None) for index, echo in enumerate(echoes) if request.echo]
    form = ChoicesForm(head, work.prompt_tokens, opening, chunk, whole, request.stream_options)
    return await answer(served, http, request, work, rows, form)


async def completion_work(served: Served, http: Request, request: CompletionRequest, default: int | None) -> Work:
    """Read prompts into what the engine has to do: by default `default` tokens, or as many as there is room for."""
    served.check(request.model)
    prompts = await served.read(lambda: _prompt_ids(served, _given(request)))
    note_prompts(served, http, prompts, prompts=request.prompt)
    asked = request.max_tokens
    if asked is None and default is not None:
        room = served.engine.longest - max(map(len, prompts))
        asked = min(default, room, served.limits.new_tokens or default)
    return Work(prompts, None if asked is None else max(asked, 1), "prompt", request.logprobs, request.wanted)


def _given(request: CompletionRequest) -> list[str | list[int]]:
    """Return each prompt, as it was sent: text or token ids."""
    given: Any = request.prompt
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def _prompt_ids(served: Served, given: Sequence[str | Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt."""
    for prompt in given:
        if isinstance(prompt, str):
            served.check_text(prompt, "prompt")
    begin = served.tokenizer.bos_token_id
    # Not all tokenizers put it before a text.
    empty = () if begin is None else (begin,)
    return [
        tuple(map(int, served.tokenizer(prompt).input_ids or empty if isinstance(prompt, str) else prompt))
        for prompt in given
    ]


async def _echo(served: Served, request: CompletionRequest, given: str | Sequence[int], prompt: Sequence[int]) -> _Echo:
    """Read a prompt, as it was given and as token ids, for what comes before its answers."""
    if not request.echo:
        return _Echo()
    shown = await served.read(lambda: prompt_text(served.tokenizer, given))
    if request.logprobs is None:
        return _Echo(shown.text)
    of_prompt = await served.score(prompt, request.logprobs)
    # The bos token of an empty text writes nothing.
    first, *pieces = shown.pieces or ("",)
    offsets = accumulate(map(len, pieces), initial=len(first))
    scored = [ScoredToken(*each) for each in zip(prompt[1:], of_prompt, pieces, offsets, strict=False)]
    # Nothing says how likely the first token is.
    alone: Body = {"text_offset": [0], "token_logprobs": [None], "tokens": [first], "top_logprobs": [None]}
    return _Echo(shown.text, _joined(alone, _logprobs(served.texts, scored, 0)))


def _choice(index: int, text: str, logprobs: Body | None, reason: str | None) -> Body:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _joined(before: Body | None, logprobs: Body | None) -> Body | None:
    """Join the log-probabilities of a prompt and of its answer."""
    if before is None or logprobs is None:
        return logprobs
    return {name: before[name] + found for name, found in logprobs.items()}


def _logprobs(texts: TokenTexts, scored: Sequence[ScoredToken], before: int) -> Body:
    """Write log-probabilities of tokens in the form of completions; `before` characters precede them."""
    return {
        "text_offset": [before + each.offset for each in scored],
        "token_logprobs": [finite(each.logprobs.logprob) for each in scored],
        "tokens": [each.text for each in scored],
        "top_logprobs": [_top(texts, each) for each in scored],
    }


def _top(texts: TokenTexts, scored: ScoredToken) -> dict[str, float]:
    """Map the likeliest tokens, and the chosen one, by their text. Of equal texts the likeliest is kept."""
    top: dict[str, float] = {}
    for token, value in scored.logprobs.top:
        top.setdefault(scored.text if token == scored.token else texts.text(token), finite(value))
    top.setdefault(scored.text, finite(scored.logprobs.logprob))
    return top
