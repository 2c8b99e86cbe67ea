"""Answers requests of all endpoints: rows for the engine, and what comes of them, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol, TypeVar

from pydantic_core import to_jsonable_python
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from transformers import LogitsProcessor

from selfspec.errors import SelfSpecError
from selfspec.serve.api_error import ApiError, api_error
from selfspec.serve.chat.call_reader import CallableTools
from selfspec.serve.chat.thoughts import Thoughts
from selfspec.serve.choice import Choice, Counts, Piece
from selfspec.serve.events import Committed, Event, Finished, Ticket
from selfspec.serve.grammar import GrammarProcessor, Wanted
from selfspec.serve.monitoring import note
from selfspec.serve.row_request import OccurrencePenalty, RowRequest
from selfspec.serve.schemas import GenerationFields, StreamOptions, in_one_piece
from selfspec.serve.served import Served

_Found = TypeVar("_Found")

Body = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What an endpoint has the engine do: `asked` new tokens, or as many as there is room for, behind each prompt.

    `where` is the field that holds the prompts; `logprobs` is that of `RowRequest`. Answers fit `wanted`; None: any
    text.
    """

    prompts: Sequence[tuple[int, ...]]
    asked: int | None
    where: str
    logprobs: int | None = None
    wanted: Wanted | None = None
    tools: CallableTools | None = None
    thoughts: Thoughts | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))


class Form(Protocol):
    """How an endpoint writes answers, whole or as the events of a stream, each of them as it is sent."""

    media_type: str = "text/event-stream"

    def whole(self, choices: Sequence[Choice], counts: Counts) -> Body:
        """All answers."""

    def begin(self) -> Iterable[str]:
        """Write what comes before the first piece."""
        return ()

    def piece(self, index: int, new: Piece, counts: Counts) -> Iterable[str]:
        """Write what is new of the answer of this index; so far there are so many tokens."""

    def end(self, choices: Sequence[Choice], counts: Counts) -> Iterable[str]:
        """Write what comes after the last piece."""

    def failed(self, error: ApiError) -> Iterable[str]:
        """Write what comes after a failure, in place of all that is left."""


@dataclass(frozen=True)
class ChoicesForm(Form):
    """The form of chats and completions: a list of choices behind `head`, that each event of a stream begins with.

    `opening` are choices of events before the first piece; `chunk` makes the choice of an event, `one` that of an
    answer.
    """

    head: Body
    prompt_tokens: int
    opening: Iterable[Body]
    chunk: Callable[[int, Piece], Body]
    one: Callable[[int, Choice], Body]
    options: StreamOptions | None

    def whole(self, choices: Sequence[Choice], counts: Counts) -> Body:
        each = [self.one(index, choice) for index, choice in enumerate(choices)]
        return {**self.head, "choices": each, "usage": usage(self.prompt_tokens, counts)}

    def begin(self) -> Iterable[str]:
        return [self._event([choice], Counts()) for choice in self.opening]

    def piece(self, index: int, new: Piece, counts: Counts) -> Iterable[str]:
        if new.text or new.thought or new.scored or new.calls or new.finish_reason:
            yield self._event([self.chunk(index, new)], counts)

    def end(self, choices: Sequence[Choice], counts: Counts) -> Iterable[str]:
        if self.options is not None and self.options.include_usage:
            yield event({**self.head, "choices": [], "usage": usage(self.prompt_tokens, counts)})
        yield "data: [DONE]\n\n"

    def failed(self, error: ApiError) -> Iterable[str]:
        return [event(error.body), "data: [DONE]\n\n"]

    def _event(self, choices: list[Body], counts: Counts) -> str:
        found = {**self.head, "choices": choices}
        if self.options is not None and self.options.include_usage:
            each = usage(self.prompt_tokens, counts) if self.options.continuous_usage_stats else None
            found["usage"] = each
        return event(found)


def head_of(served: Served, http: Request, prefix: str, kind: str) -> Body:
    """Write what an answer, and each event of a stream, begins with; ids begin with `prefix`."""
    name = f"{prefix}-{http.scope['selfspec']['request_id']}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": served.name}


def note_prompts(served: Served, http: Request, prompts: Sequence[Sequence[int]], /, **texts: Any) -> None:
    """Count the tokens of prompts, and write their text to the log where that is asked for."""
    note(http.scope, prompt_tokens=sum(map(len, prompts)))
    if served.log_text:
        note(http.scope, **to_jsonable_python(texts, exclude_none=True))
    for prompt in prompts:
        served.metrics.prompt_tokens.observe(len(prompt))


async def _row_requests(served: Served, http: Request, request: GenerationFields, work: Work) -> list[RowRequest]:
    """Make a row for each answer, `n` of each prompt. A client who leaves waits for no grammar."""
    prompts, where = work.prompts, work.where
    answers, most = len(prompts) * (request.n or 1), served.limits.answers
    if answers > most:
        raise ApiError(400, f"{answers} answers (prompts times n) are more than {most}, the most of a request", "n")
    longest = [_longest(served, prompt, work.asked, where) for prompt in prompts]
    if (request.min_tokens or 0) > min(longest):
        raise ApiError(400, f"min_tokens: there is room for {min(longest)} new tokens", "min_tokens")
    grammar = None if work.wanted is None else await unless_gone(http, _compiled(served, work.wanted))
    predicted = await served.read(lambda: _predicted(served, request))

    def rows() -> list[RowRequest]:
        options = _options(served, request)
        return [
            RowRequest(
                prompt,
                most,
                {**options, **_processors(request, prompt, grammar)},
                _seed(request.seed, index),
                work.logprobs,
                predicted,
                request.draft is None,
            )
            for prompt, most in zip(prompts, longest, strict=True)
            for index in range(request.n or 1)
        ]

    return await served.submit(rows)


def _predicted(served: Served, request: GenerationFields) -> tuple[int, ...] | None:
    """Return the tokens that the answer is predicted to be."""
    if request.prediction is None:
        return None
    text = in_one_piece(request.prediction.content)
    served.check_text(text, "prediction")
    return tuple(served.tokenizer(text, add_special_tokens=False).input_ids)


async def _compiled(served: Served, wanted: Wanted) -> GrammarProcessor:
    """Compile what the answers have to fit, within the time of a request."""
    seconds = served.limits.request_seconds
    try:
        async with asyncio.timeout(seconds):
            return await served.compile(wanted)
    except TimeoutError:
        raise ApiError(
            408,
            f"response_format was not compiled within {seconds:g} s, the most that a request may take; bound fewer "
            "strings in it",
            "response_format",
            "request_timeout",
        ) from None


def _longest(served: Served, prompt: tuple[int, ...], asked: int | None, where: str) -> int:
    """Return the most new tokens after a prompt."""
    if not prompt:
        raise ApiError(400, f"{where} is empty, and this model has no token to begin a text with; say something", where)
    most, context = served.limits.new_tokens, served.engine.longest
    if asked is not None and most is not None and asked > most:
        raise ApiError(400, f"max_tokens: {asked} is more than {most}, the most that this server writes", "max_tokens")
    room = context - len(prompt)
    if room < (asked or 1):
        found = f"{where} has {len(prompt)} tokens" + (f" and max_tokens is {asked}" if asked else "")
        raise ApiError(
            400,
            f"{found}, which is beyond the context of {context} tokens; shorten {where}"
            + (f", or ask for at most {room} tokens" if asked and room > 0 else ""),
            where if room < 1 or not asked else "max_tokens",
            "context_length_exceeded",
        )
    served.check_tokens(prompt, where, served.readable)
    return asked or min(room, most or room)


def _options(served: Served, request: GenerationFields) -> dict[str, Any]:
    """Say how tokens are chosen, and which of them end an answer, as keywords of `generate`."""
    temperature = 1.0 if request.temperature is None else float(request.temperature)
    further = request.stop_token_ids or []
    served.check_tokens(further, "stop_token_ids", served.readable)
    biases = {(int(token),): float(value) for token, value in (request.logit_bias or {}).items()}
    served.check_tokens([token for (token,) in biases], "logit_bias", served.vocabulary)
    options = {
        # What is not said filters nothing, nor does -1: transformers has a top-k of 50 by default.
        "temperature": temperature,
        "top_k": max(request.top_k or 0, 0),
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "min_p": request.min_p or 0.0,
    }
    return {
        **(options if temperature else {}),
        **({"sequence_bias": biases} if biases else {}),
        "do_sample": temperature > 0,
        # The checkpoint may have others.
        "repetition_penalty": float(request.repetition_penalty or 1.0),
        "min_new_tokens": request.min_tokens or 0,
        "eos_token_id": sorted({*further, *(() if request.ignore_eos else served.end_tokens)}) or None,
    }


def _seed(seed: int | None, index: int) -> int | None:
    """Return the seed of the answer with this index of `n`: every one is another, and the first has the request's."""
    return None if seed is None else (seed + 2**63 + index) % 2**64 - 2**63


def _processors(request: GenerationFields, prompt: Sequence[int], grammar: GrammarProcessor | None) -> dict[str, Any]:
    """Make the processors that change the scores of one answer."""
    made: list[LogitsProcessor] = []
    presence, frequency = request.presence_penalty or 0.0, request.frequency_penalty or 0.0
    if presence or frequency:
        made.append(OccurrencePenalty(len(prompt), presence, frequency))
    if grammar is not None:
        made.append(grammar.fresh())
    return {"logits_processor": made} if made else {}


async def answer(served: Served, http: Request, request: GenerationFields, work: Work, form: Form) -> Response:
    """Run what a request asks for, and answer: once all answers have ended, or piece by piece."""
    rows = await _row_requests(served, http, request, work)
    answering = Answering(served, rows, request.stop or [], work)
    try:
        await served.submit(answering.submit)
    except BaseException:
        answering.cancel()
        raise
    if request.stream:
        return Stream(answering.cancel, _events(http, answering, form), form.media_type)

    async def run() -> None:
        async for _ in answering.pieces(http):
            pass

    try:
        await unless_gone(http, run())
    finally:
        answering.cancel()
    return JSONResponse(form.whole(answering.choices, answering.counts))


async def _events(http: Request, answering: Answering, form: Form) -> AsyncIterator[str]:
    """Yield answers as server-sent events."""
    try:
        for each in form.begin():
            yield each
        async for index, new in answering.pieces(http):
            for each in form.piece(index, new, answering.counts):
                yield each
        for each in form.end(answering.choices, answering.counts):
            yield each
    except ApiError as error:
        for each in form.failed(error):
            yield each


async def unless_gone(http: Request, work: Coroutine[Any, Any, _Found]) -> _Found:
    """Wait for work, unless the client leaves: then the work is cancelled."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            # As nginx says it; nobody reads it but the log.
            raise ApiError(499, "the client closed the request")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class Stream(StreamingResponse):
    """Events that are sent as they come. Whatever ends it, even before the first event, cancels the work."""

    def __init__(
        self, cancel: Callable[[], None], events: AsyncIterator[str], media_type: str = Form.media_type
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type=media_type, headers=headers)
        self._cancel = cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._cancel()


def event(content: Body, name: str | None = None) -> str:
    """Write an event of a stream; where events have names, that is its name."""
    named = "" if name is None else f"event: {name}\n"
    return f"{named}data: {json.dumps(content, separators=(',', ':'))}\n\n"


def usage(prompt_tokens: int, counts: Counts) -> Body:
    """Say what a request took; the draft tokens of all sources have names of their own."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": counts.tokens,
        "total_tokens": prompt_tokens + counts.tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {
            "reasoning_tokens": counts.thought,
            "accepted_prediction_tokens": counts.predicted,
            "rejected_prediction_tokens": counts.mispredicted,
            "draft_tokens": counts.drafted,
            "accepted_draft_tokens": counts.accepted,
        },
    }


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold, as OpenAI writes it for tokens that cannot be."""
    return max(logprob, -9999.0)


class Answering:
    """Answers one request within its time: a row of the engine for each answer, ended by any stop string."""

    def __init__(self, served: Served, rows: Sequence[RowRequest], stops: Sequence[str], work: Work) -> None:
        self._served = served
        self._answers = len(rows) // len(work.prompts)
        self._rows = rows
        self._loop = asyncio.get_running_loop()
        self._begun = self._loop.time()
        self._until = self._begun + served.limits.request_seconds
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        # One that is cancelled before it is handed over ends before it is read.
        self._tickets = [Ticket(self._listener(index)) for index in range(len(rows))]
        self.choices = [Choice(served.tokenizer, row.input_ids, stops, work.tools, work.thoughts) for row in rows]

    def submit(self) -> None:
        """Hand every row to the engine, or none. May be called from any thread."""
        try:
            self._served.engine.submit_all(self._rows, self._tickets)
        except SelfSpecError as error:
            raise api_error(error, "max_tokens") from error

    def cancel(self) -> None:
        """End what still runs, or was not handed over yet."""
        for ticket in self._tickets:
            ticket.cancel()

    async def pieces(self, http: Request) -> AsyncIterator[tuple[int, Piece]]:
        """Yield what is new of the answer of an index, as it comes, until every one has ended; count it."""
        growing, metrics = set(range(len(self.choices))), self._served.metrics
        # Seconds until the last tokens of each answer, since the request's beginning.
        first, last = None, dict[int, float]()
        try:
            while growing:
                index, event = await self._next()
                seconds = self._loop.time() - self._begun
                if index not in growing:
                    continue
                if isinstance(event, Finished) and event.error is not None:
                    raise api_error(event.error) from event.error
                choice, before = self.choices[index], self.choices[index].counts.tokens
                piece = choice.take(event) if isinstance(event, Committed) else choice.end(event)
                tokens = choice.counts.tokens - before
                if tokens and index in last:
                    for _ in range(tokens):
                        metrics.between_tokens.observe((seconds - last[index]) / tokens)
                elif tokens:
                    first = seconds if first is None else first
                    metrics.first_token.observe(seconds)
                if tokens:
                    last[index] = seconds
                if piece.finish_reason is not None:
                    growing.remove(index)
                    self._tickets[index].cancel()
                    metrics.ended(piece.finish_reason)
                    metrics.whole_answer.observe(seconds)
                    metrics.answer_tokens.observe(choice.counts.tokens)
                yield index, piece
        finally:
            counts = self.counts
            note(
                http.scope,
                completion_tokens=counts.tokens,
                cached_tokens=counts.cached,
                drafted=counts.drafted,
                accepted=counts.accepted,
                first_token_seconds=None if first is None else round(first, 4),
                finish_reasons=[choice.finish_reason for choice in self.choices],
                **({"answers": [choice.text for choice in self.choices]} if self._served.log_text else {}),
            )

    async def _next(self) -> tuple[int, Event]:
        """Wait for the next event, and the index of its answer, within the time of the request."""
        try:
            async with asyncio.timeout_at(self._until):
                return await self._events.get()
        except TimeoutError:
            raise ApiError(
                408,
                f"the answer is not complete after {self._served.limits.request_seconds:g} s, the most that a request "
                "may take; ask for fewer tokens, or try again when fewer requests run",
                None,
                "request_timeout",
            ) from None

    @property
    def counts(self) -> Counts:
        """Tokens of all answers together."""
        every = [choice.counts for choice in self.choices]
        counts = Counts(*(sum(values) for values in zip(*map(astuple, every), strict=True)))
        # A prompt is counted once, however many answers it has.
        return replace(counts, cached=sum(each.cached for each in every[:: self._answers]))

    def _listener(self, index: int) -> Callable[[Event], object]:
        return lambda event: self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))
