"""`POST /v1/completions` continues text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from starlette.requests import Request
from starlette.responses import Response

from selfspec.serve.choice import Choice, Piece
from selfspec.serve.endpoints.answering import (
    Body,
    ChoicesForm,
    Work,
    answer,
    finite,
    head_of,
    note_prompts,
)
from selfspec.serve.events import TokenLogprobs
from selfspec.serve.schemas import CompletionRequest
from selfspec.serve.served import Served, TokenTexts

DEFAULT_TOKENS = 16


async def complete(served: Served, http: Request, request: CompletionRequest) -> Response:
    """Answer a request, with few tokens where it says nothing else."""
    work = await completion_work(served, http, request, DEFAULT_TOKENS)
    # Letters that the tokens of each answer, as far as they were sent, write.
    written = Counter[int]()

    def choice(index: int, new: Piece | Choice) -> Body:
        logprobs = None
        if request.logprobs is not None:
            logprobs = _logprobs(served.texts, new.scored, written[index])
            written[index] += sum(map(len, logprobs["tokens"]))
        return {"index": index, "text": new.text, "logprobs": logprobs, "finish_reason": new.finish_reason}

    head = head_of(served, http, "cmpl", "text_completion")
    form = ChoicesForm(head, work.prompt_tokens, (), choice, choice, request.stream_options)
    return await answer(served, http, request, work, form)


async def completion_work(served: Served, http: Request, request: CompletionRequest, default: int | None) -> Work:
    """Read prompts into what the engine has to do: by default `default` tokens, or as many as there is room for."""
    served.check(request.model)
    prompts = await served.read(lambda: _prompt_ids(served, request.prompt))
    note_prompts(served, http, prompts, prompts=request.prompt)
    asked = request.max_tokens
    if asked is None and default is not None:
        room = served.engine.longest - max(map(len, prompts))
        asked = max(min(default, room, served.limits.new_tokens or default), 1)
    return Work(prompts, asked, "prompt", request.logprobs, request.wanted)


def _prompt_ids(served: Served, given: list[str | list[int]]) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt, which is text or token ids."""
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


def _logprobs(texts: TokenTexts, scored: Sequence[TokenLogprobs], before: int) -> Body:
    """Write log-probabilities of tokens in the form of completions; `before` characters precede them."""
    tokens = [texts.text(each.token) for each in scored]
    return {
        "text_offset": [*accumulate(map(len, tokens), initial=before)][:-1],
        "token_logprobs": [finite(each.logprob) for each in scored],
        "tokens": tokens,
        "top_logprobs": [_top(texts, each) for each in scored],
    }


def _top(texts: TokenTexts, scored: TokenLogprobs) -> dict[str, float]:
    """Map the likeliest tokens, and the chosen one, by their text. Of equal texts the likeliest is kept."""
    top: dict[str, float] = {}
    for token, value in (*scored.top, (scored.token, scored.logprob)):
        top.setdefault(texts.text(token), finite(value))
    return top
