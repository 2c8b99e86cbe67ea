"""What both kinds of requests share: rows for the engine, answers to their end or in a stream, and usage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from selfspec.serve.answering import Answering, NewPiece
from selfspec.serve.api_error import ApiError
from selfspec.serve.request_log import note
from selfspec.serve.row_request import RowRequest, SamplingParams
from selfspec.serve.schemas import GenerationFields
from selfspec.serve.served import Served

_Found = TypeVar("_Found")
Body = dict[str, Any]


class ClientLeftError(Exception):
    """Nobody waits for the answer any more."""


@dataclass
class Times:
    """When each answer's tokens came, for metrics: seconds since the request's beginning."""

    first: dict[int, float] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)


def row_requests(
    served: Served,
    request: GenerationFields,
    prompts: Sequence[tuple[int, ...]],
    asked: int | None,
    logprobs: int | None,
    where: str,
) -> list[RowRequest]:
    """A row for each answer: `n` of each prompt.

    Args:
        served: the model.
        request: how tokens are chosen.
        prompts: token ids.
        asked: the most new tokens of an answer; None: what there is room for.
        logprobs: see `RowRequest`.
        where: the field that holds the prompts.

    Raises:
        ApiError: a field is out of the bounds of this model or server.
        UnsupportedOptionError: a response format cannot be honoured.
    """
    answers = len(prompts) * (request.n or 1)
    if answers > served.limits.answers:
        most = served.limits.answers
        raise ApiError(400, f"{answers} answers (prompts times n) are more than {most}, the most of a request", "n")
    rows = []
    for prompt in prompts:
        longest = _longest(served, prompt, asked, where)
        for index in range(request.n or 1):
            sampling = _sampling(served, request, index)
            rows.append(RowRequest(prompt, longest, sampling, _end_tokens(served, request), logprobs))
    return rows


def _longest(served: Served, prompt: tuple[int, ...], asked: int | None, where: str) -> int:
    """The most new tokens after a prompt."""
    wrong = next((token for token in prompt if token >= served.vocabulary), None)
    if wrong is not None:
        raise ApiError(400, f"{where}: token id {wrong} is outside the vocabulary 0..{served.vocabulary - 1}", where)
    if not prompt:
        raise ApiError(400, f"{where} is empty, and this model has no token to begin a text with; say something", where)
    most = served.limits.new_tokens
    if asked is not None and most is not None and asked > most:
        raise ApiError(400, f"max_tokens: {asked} is more than {most}, the most that this server writes", "max_tokens")
    room = served.context - len(prompt)
    if room < (asked or 1):
        found = f"{where} has {len(prompt)} tokens" + (f" and max_tokens is {asked}" if asked else "")
        raise ApiError(
            400,
            f"{found}, which is beyond the context of {served.context} tokens; shorten {where}"
            + (f", or ask for at most {room} tokens" if asked and room > 0 else ""),
            where if room < 1 or not asked else "max_tokens",
            "context_length_exceeded",
        )
    return asked or min(room, most or room)


def _sampling(served: Served, request: GenerationFields, index: int) -> SamplingParams:
    """How the tokens of the answer with this index of `n` are chosen."""
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    wrong = next((token for token in bias if token >= served.vocabulary), None)
    if wrong is not None:
        last = served.vocabulary - 1
        raise ApiError(400, f"logit_bias: token id {wrong} is outside the vocabulary 0..{last}", "logit_bias")
    seed = request.seed
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        # What is not said filters nothing: transformers has a top-k of 50 by default.
        top_k=request.top_k or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or None,
        # Every answer of n is another one; the first is that of the seed itself.
        seed=None if seed is None else (seed + 2**63 + index) % 2**64 - 2**63,
        logit_bias=bias,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=request.repetition_penalty,
        processors=served.grammars.processor(request.response_format),
    )


def _end_tokens(served: Served, request: GenerationFields) -> frozenset[int]:
    further = frozenset(request.stop_token_ids or ())
    wrong = next((token for token in further if token >= served.vocabulary), None)
    if wrong is not None:
        last = served.vocabulary - 1
        raise ApiError(400, f"stop_token_ids: token id {wrong} is outside the vocabulary 0..{last}", "stop_token_ids")
    return further if request.ignore_eos else further | served.end_tokens


def stop_strings(request: GenerationFields) -> list[str]:
    """The strings that end an answer."""
    if request.stop is None:
        return []
    return [request.stop] if isinstance(request.stop, str) else request.stop


async def begun(served: Served, request: GenerationFields, rows: Sequence[RowRequest]) -> Answering:
    """Hand rows to the engine.

    Raises:
        ApiError: it does not take them.
    """
    answering = Answering(served.engine, served.tokenizer, rows, stop_strings(request), served.limits.request_seconds)
    try:
        await served.read(answering.submit)
    except BaseException:
        answering.cancel()
        raise
    return answering


async def finished(served: Served, http: Request, answering: Answering) -> None:
    """Wait for the end of every answer.

    Raises:
        ApiError: one failed.
        ClientLeftError: nobody waits any more.
    """

    async def work() -> None:
        async for _ in watched(served, http, answering):
            pass

    try:
        await unless_gone(http, work())
    finally:
        answering.cancel()


async def watched(served: Served, http: Request, answering: Answering) -> AsyncIterator[NewPiece]:
    """The pieces of answers, counted on their way."""
    times = Times()
    try:
        async for new in answering.pieces():
            if new.tokens:
                if new.index in times.last:
                    between = (new.seconds - times.last[new.index]) / new.tokens
                    for _ in range(new.tokens):
                        served.metrics.between_tokens.observe(between)
                else:
                    times.first[new.index] = new.seconds
                    served.metrics.first_token.observe(new.seconds)
                times.last[new.index] = new.seconds
            if new.piece.finish_reason is not None:
                served.metrics.ended(new.piece.finish_reason)
                served.metrics.whole_answer.observe(new.seconds)
                served.metrics.answer_tokens.observe(answering.choices[new.index].counts.tokens)
            yield new
    finally:
        counts = answering.counts
        note(
            http.scope,
            completion_tokens=counts.tokens,
            drafted=counts.drafted,
            accepted=counts.accepted,
            first_token_seconds=round(min(times.first.values()), 4) if times.first else None,
            finish_reasons=[choice.finish_reason for choice in answering.choices],
        )
        if served.log_text:
            note(http.scope, answers=[choice.text for choice in answering.choices])


async def unless_gone(http: Request, work: Coroutine[Any, Any, _Found]) -> _Found:
    """Wait for work, unless the client leaves.

    Raises:
        ClientLeftError: it left; the work was cancelled.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def streamed(
    served: Served,
    http: Request,
    request: GenerationFields,
    answering: Answering,
    prompt_tokens: int,
    head: Body,
    opening: Sequence[Body],
    chunk: Callable[[NewPiece], Body],
) -> StreamingResponse:
    """Answers as server-sent events.

    Args:
        served: the model.
        http: the request.
        request: its body.
        answering: begun.
        prompt_tokens: of all prompts.
        head: what every event says.
        opening: choices of events before the first piece.
        chunk: makes the choice of an event from a piece.
    """
    with_usage = request.stream_options is not None and request.stream_options.include_usage

    def event(choices: list[Body], **more: Any) -> str:
        unused = {"usage": None} if with_usage else {}
        return _event({**head, "choices": choices, **unused, **more})

    async def events() -> AsyncIterator[str]:
        try:
            for choice in opening:
                yield event([choice])
            async for new in watched(served, http, answering):
                if new.piece.text or new.piece.scored or new.piece.finish_reason:
                    yield event([chunk(new)])
            if with_usage:
                yield event([], usage=usage(prompt_tokens, answering))
        except ApiError as error:
            yield _event(error.body)
        yield "data: [DONE]\n\n"

    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return _Stream(answering, events(), headers)


class _Stream(StreamingResponse):
    """Events that are sent as they come. Whatever ends it, even before the first event, ends the answers."""

    def __init__(self, answering: Answering, events: AsyncIterator[str], headers: Mapping[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answering.cancel()


def _event(content: Body) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


def usage(prompt_tokens: int, answering: Answering | None) -> Body:
    """What a request took. Draft tokens are counted as OpenAI counts those of predicted outputs."""
    counts = None if answering is None else answering.counts
    tokens, drafted, accepted = (0, 0, 0) if counts is None else (counts.tokens, counts.drafted, counts.accepted)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }
