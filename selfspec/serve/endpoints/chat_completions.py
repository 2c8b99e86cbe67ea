"""`POST /v1/chat/completions`: messages to answer; other chat APIs are read into it, and answered by items in order."""

from __future__ import annotations

import json
import re
import uuid
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from starlette.requests import Request
from starlette.responses import Response

from selfspec.errors import PromptError
from selfspec.serve.api_error import ApiError, api_error
from selfspec.serve.chat.call_formats import CallFormat, ResponseFormat
from selfspec.serve.chat.call_reader import CallDelta, ToolCall
from selfspec.serve.chat.template import ChatTemplate
from selfspec.serve.choice import Choice, Counts, Piece
from selfspec.serve.endpoints.answering import (
    Body,
    ChoicesForm,
    Form,
    Work,
    answer,
    finite,
    head_of,
    note_prompts,
)
from selfspec.serve.events import TokenLogprobs
from selfspec.serve.grammar import CallGrammar
from selfspec.serve.schemas import (
    ChatCompletionRequest,
    Message,
    Tool,
    in_one_piece,
    validated,
)
from selfspec.serve.served import Served, TokenTexts


async def chat(served: Served, http: Request, request: ChatCompletionRequest) -> Response:
    """Answer a request."""
    work = await chat_work(served, http, request)
    head = head_of(served, http, "chatcmpl", "chat.completion.chunk" if request.stream else "chat.completion")

    def logprobs(scored: Sequence[TokenLogprobs]) -> Body | None:
        return None if work.logprobs is None else _logprobs(served.texts, scored)

    def chunk(index: int, new: Piece) -> Body:
        parts = {"reasoning_content": new.thought, "content": new.text, "tool_calls": list(map(_delta, new.calls))}
        said = {name: part for name, part in parts.items() if part}
        return _chunk(index, said, logprobs(new.scored), new.finish_reason)

    def one(index: int, choice: Choice) -> Body:
        message: Body = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            calls = [called(call.id, call.name, call.arguments) for call in choice.calls]
            message |= {"content": choice.text or None, "tool_calls": calls}
        if choice.thought:
            message["reasoning_content"] = choice.thought
        reason = choice.finish_reason
        return {"index": index, "message": message, "logprobs": logprobs(choice.scored), "finish_reason": reason}

    opening = (_chunk(index, {"role": "assistant", "content": ""}) for index in range(request.n or 1))
    form = ChoicesForm(head, work.prompt_tokens, opening, chunk, one, request.stream_options)
    return await answer(served, http, request, work, form)


async def chat_work(served: Served, http: Request, request: ChatCompletionRequest) -> Work:
    """Read a conversation into what the engine has to do."""
    served.check(request.model)
    template = served.template
    if template is None:
        raise ApiError(
            400,
            "this model has no chat template; start the server with --template FILE, or ask /v1/completions",
            "messages",
            "no_chat_template",
        )
    prompt = await served.read(lambda: _prompt(served, template, request))
    note_prompts(served, http, [prompt], messages=request.messages)
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    top = (request.top_logprobs or 0) if request.logprobs else None
    wanted = request.wanted
    calls = bool(request.tools) and request.tool_choice != "none"
    # What has to fit something thinks nothing.
    free = wanted is None and (not calls or request.tool_choice in (None, "auto"))
    thoughts = template.thoughts(prompt, calls) if free else None
    if not request.tools or not calls:
        return Work([prompt], asked, "messages", top, wanted, thoughts=thoughts)
    tools = template.callable({tool.function.name: tool.function.parameters or {} for tool in request.tools})
    grammar = call_grammar(request, template.reads, wanted)
    return Work([prompt], asked, "messages", top, grammar or wanted, tools, thoughts)


def call_grammar(
    request: ChatCompletionRequest, form: CallFormat | ResponseFormat | None, wanted: dict[str, Any] | str | None
) -> CallGrammar | None:
    """Return what an answer that may call tools, in this form, has to fit; None: any text.

    `wanted` is the response format that is asked for, if any.
    """
    needed, tools = request.tool_choice not in (None, "auto"), request.tools or []
    # Where calls are not read at all, none are too many.
    limited = request.parallel_tool_calls is False and form is not None
    if not needed and wanted is None and not limited and not any(tool.function.strict for tool in tools):
        return None
    if not isinstance(form, CallFormat):
        raise ApiError(
            400,
            "tool_choice: how this model writes calls is not known to grammars; say 'auto' or 'none'",
            "tool_choice",
        )
    if isinstance(request.tool_choice, Tool):
        named = request.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == named]
    otherwise = None if needed else wanted
    if isinstance(otherwise, str):
        raise ApiError(400, "response_format: beside tools it may be JSON alone", "response_format")
    anything = {"type": "object", "properties": {}}
    schemas = {tool.function.name: tool.function.parameters or anything for tool in tools}
    strict = frozenset(tool.function.name for tool in tools if tool.function.strict)
    # A call that has to be is one, unless several are asked for; of those that may be, all are let be.
    may = not needed and otherwise is None
    many = request.parallel_tool_calls is not False if may else bool(request.parallel_tool_calls)
    return CallGrammar(form, schemas, needed, many, otherwise, strict)


def _prompt(served: Served, template: ChatTemplate, request: ChatCompletionRequest) -> tuple[int, ...]:
    """Return the token ids of the conversation."""
    if len(request.messages) > served.engine.longest:
        raise ApiError(
            400, "there are more messages than the context has tokens", "messages", "context_length_exceeded"
        )
    served.check_text("".join(in_one_piece(message.content) for message in request.messages), "messages")
    tools: list[dict[str, Any]] = []
    if request.tools and request.tool_choice != "none":
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        served.check_text(json.dumps(tools, ensure_ascii=False), "tools")
    variables, writer = dict(request.chat_template_kwargs or {}), template.writers[bool(tools)]
    if tools and not writer.reads_tools:
        said = "tools: the chat template tells the model of none; give one that does with --template FILE, or send none"
        raise ApiError(400, said, "tools")
    unknown = sorted(variables.keys() - writer.variables)
    if unknown:
        read = ", ".join(sorted(writer.variables)) or "none"
        said = f"chat_template_kwargs: the template reads no {unknown[0]!r}; it reads {read}"
        raise ApiError(400, said, "chat_template_kwargs")
    thinking, effort = request.enable_thinking, request.reasoning_effort
    switched = "enable_thinking" in writer.variables
    if effort is not None and "reasoning_effort" in writer.variables:
        variables["reasoning_effort"] = effort
    elif effort is not None and switched and thinking is None:
        thinking = effort != "none"
    elif effort is not None:
        raise ApiError(400, "reasoning_effort: the template of this model reads none; drop it", "reasoning_effort")
    if switched and thinking is not None:
        variables["enable_thinking"] = thinking
    elif thinking is not None and thinking is not bool(writer.thinks):
        said = "enable_thinking: the template of this model has no switch for it; drop it"
        raise ApiError(400, said, "enable_thinking")
    if any(message.name and message.role != "tool" for message in request.messages) and not writer.reads_names:
        raise ApiError(400, "messages: the template of this model reads no name; say it in the content", "messages")
    try:
        messages = [_plain(message) for message in request.messages]
        goes_on = bool(request.continue_final_message)
        begins = not goes_on if request.add_generation_prompt is None else request.add_generation_prompt
        return tuple(template.prompt(messages, tools, variables, goes_on, begins))
    except PromptError as error:
        raise api_error(error, "messages") from error


def _plain(message: Message) -> dict[str, Any]:
    """Write a message as templates read it: text in one piece, and arguments of calls as objects."""
    read = {"role", "content", "reasoning_content", "name", "tool_calls", "tool_call_id"}
    plain = message.model_dump(include=read, exclude_none=True)
    if plain["role"] == "developer":
        plain["role"] = "system"
    plain["content"] = in_one_piece(message.content)
    for call in plain.get("tool_calls", ()):
        name, given = call["function"]["name"], call["function"]["arguments"]
        try:
            # Clients write nothing where a function takes nothing.
            read = json.loads(given or "{}") if isinstance(given, str) else given
        except ValueError as error:
            raise PromptError(f"tool_calls: arguments of {name!r} are not JSON") from error
        call["function"] = {"name": name, "arguments": read}
    return plain


def _delta(new: CallDelta) -> Body:
    """Write what is new of a call: its id and name come first and once."""
    if not new.begins:
        return {"index": new.index, "function": {"arguments": new.arguments}}
    return {"index": new.index, **called(new.call.id, new.call.name, new.arguments)}


def _chunk(index: int, delta: Body, logprobs: Body | None = None, reason: str | None = None) -> Body:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(texts: TokenTexts, scored: Sequence[TokenLogprobs]) -> Body:
    """Write log-probabilities in the form that chats have."""

    def one(token: int, logprob: float) -> Body:
        return {"token": texts.text(token), "logprob": finite(logprob), "bytes": list(texts.raw(token))}

    content = [
        {**one(each.token, each.logprob), "top_logprobs": [one(token, value) for token, value in each.top]}
        for each in scored
    ]
    return {"content": content, "refusal": None}


class OtherChat(Protocol):
    """A chat as another API says it; `renamed` maps fields of ours to what a refusal calls them there."""

    renamed: ClassVar[Mapping[str, str]]

    def chat(self, reads: Collection[str]) -> Body:
        """Return the fields of a chat request that say the same; the template reads variables of these names."""

    def form(self, served: Served, work: Work) -> Form:
        """Return how the answer is written."""


async def answer_as(served: Served, http: Request, asked: OtherChat) -> Response:
    """Answer a chat in another API's form."""
    try:
        request, work = await read_chat(served, http, asked)
        return await answer(served, http, request, work, asked.form(served, work))
    except ApiError as error:
        own = error.param or ""
        error.param = asked.renamed.get(own, error.param)
        for name, here in asked.renamed.items():
            # Some are words of English, too.
            if name == own or "_" in name:
                error.message = re.sub(rf"\b{name}\b", here, error.message)
        raise


async def read_chat(served: Served, http: Request, asked: OtherChat) -> tuple[ChatCompletionRequest, Work]:
    """Read a chat of another API into what the engine has to do."""
    reads = served.template.writers[False].variables if served.template else frozenset()
    request = await served.read(lambda: validated(ChatCompletionRequest, asked.chat(reads)))
    return request, await chat_work(served, http, request)


Item = ToolCall | Literal["text", "thought"]


class ItemsForm(Form):
    """The form of an answer that is written as items in order: for thoughts, for text, and one for each call."""

    def __init__(self) -> None:
        # Of the item that is written; None: none is.
        self._open: Item | None = None

    def piece(self, index: int, new: Piece, counts: Counts) -> Iterable[str]:
        """Write what is new, and the items that begin and end with it."""
        texts: tuple[tuple[Item, str], ...] = (("thought", new.thought), ("text", new.text))
        for item, text in texts:
            if text and self._open != item:
                yield from self._begun(item)
            if text:
                yield from self.grown(text, item)
        for each in new.calls:
            if each.begins:
                yield from self._begun(each.call)
            if each.arguments:
                yield from self.grown(each.arguments, each.call)
            if each.ends:
                yield from self.closed()

    def closed(self) -> Iterable[str]:
        """Write the end of the item that is open."""
        now, self._open = self._open, None
        if now is not None:
            yield from self.finished(now)

    def _begun(self, item: Item) -> Iterable[str]:
        yield from self.closed()
        self._open = item
        yield from self.opened(item)

    @abstractmethod
    def opened(self, item: Item) -> Iterable[str]:
        """Write the beginning of an item."""

    @abstractmethod
    def grown(self, new: str, item: Item) -> Iterable[str]:
        """Write what is new of a call's arguments, or of a text."""

    @abstractmethod
    def finished(self, item: Item) -> Iterable[str]:
        """Write the end of an item."""


def called(id_: str, name: str, arguments: str) -> Body:
    """Write a call as chats have it."""
    return {"id": id_, **function({"name": name, "arguments": arguments})}


def function(said: Body) -> Body:
    """Write what is said of a function, or of a call of it, as chats have it."""
    return {"type": "function", "function": said}


def parsed(call: ToolCall) -> Body:
    """Read the arguments of a call as an object; what is none, as Anthropic's clients are told to write it."""
    try:
        found = json.loads(call.arguments)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": call.arguments}


def new_id(kind: str) -> str:
    """Make an id for an item of this kind."""
    return f"{kind}_{uuid.uuid4().hex[:24]}"
