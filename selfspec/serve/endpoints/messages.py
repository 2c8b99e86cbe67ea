"""`POST /v1/messages`: Anthropic's chat."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request

from selfspec.serve.api_error import ApiError
from selfspec.serve.chat.call_reader import ToolCall
from selfspec.serve.choice import Choice, Counts
from selfspec.serve.endpoints.answering import Body, Form, Work, event
from selfspec.serve.endpoints.chat_completions import Item, ItemsForm, called, function, new_id, parsed, read_chat
from selfspec.serve.schemas import HINTS, MOST_STOPS, Content, Function, Many, Part, Stop, Strict, in_one_piece
from selfspec.serve.served import Served

_EFFORT = "reasoning_effort"


class Block(Part):
    """A part of a message."""

    kinds: ClassVar = {
        "text": "text",
        "tool_use": "id name input",
        "tool_result": "tool_use_id content? is_error?",
        "thinking": "thinking",
    }
    hints = Part.hints | {"citations", "caller", "signature"}
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: Content | None = None
    is_error: bool | None = None
    thinking: str = ""


class AnthropicMessage(Strict):
    """A message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | Many[Block]


class AnthropicTool(Function):
    """A tool that the model may call."""

    hints = frozenset({"cache_control", "eager_input_streaming"})
    only: ClassVar = {"type": "custom"}
    parameters: dict[str, Any] = Field(alias="input_schema")


class AnthropicChoice(Part):
    """Whether tools are called."""

    kinds: ClassVar = {
        "auto": "disable_parallel_tool_use?",
        "any": "disable_parallel_tool_use?",
        "tool": "name disable_parallel_tool_use?",
        "none": "",
    }
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """Whether the model thinks first; how long it may is for the model to say."""

    hints = frozenset({"budget_tokens", "display"})
    type: Literal["enabled", "adaptive", "disabled"]


class CountRequest(Strict):
    """`POST /v1/messages/count_tokens`."""

    hints = HINTS
    # What is left out of a long conversation: nothing.
    only: ClassVar = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    renamed: ClassVar[Mapping[str, str]] = {"stop": "stop_sequences", "enable_thinking": "thinking"}
    model: str
    messages: Annotated[Many[AnthropicMessage], Field(min_length=1)]
    system: Content | None = None
    tools: Many[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    # How eager the model is, where its template reads that.
    output_config: dict[Literal["effort"], str | None] | None = None

    def chat(self, reads: Collection[str]) -> Body:
        """Return the fields of a chat request that say the same; the template reads variables of these names."""
        choice = self.tool_choice
        kinds = {"any": "required", "tool": function({"name": choice and choice.name})}
        one = choice and choice.disable_parallel_tool_use
        system = [] if self.system is None else [{"role": "system", "content": in_one_piece(self.system)}]
        tools = [tool.model_dump() for tool in self.tools or ()]
        return {
            "model": self.model,
            "messages": system + [each for message in self.messages for each in _messages(message)],
            "tools": [*map(function, tools)] or None,
            "tool_choice": choice and kinds.get(choice.type, choice.type),
            "parallel_tool_calls": None if one is None else not one,
            "enable_thinking": self._thinks(reads),
            # A hint: it is left where the template reads none.
            "reasoning_effort": (self.output_config or {}).get("effort") if _EFFORT in reads else None,
            # An answer of its own begins where the last message is the assistant's.
            "continue_final_message": True if self.messages[-1].role == "assistant" else None,
        }

    def form(self, served: Served, work: Work) -> Form:
        return MessageForm(served, work)

    def _thinks(self, reads: Collection[str]) -> bool | None:
        """Return whether it is to think; None: that is left to the model, as where it may and has no switch."""
        said = self.thinking and self.thinking.type
        left = said is None or (said == "adaptive" and "enable_thinking" not in reads)
        return None if left else said != "disabled"


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Annotated[Many[Stop], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None

    def chat(self, reads: Collection[str]) -> Body:
        alike = self.model_dump(include={"max_tokens", "temperature", "top_p", "top_k", "stream"})
        return {**super().chat(reads), **alike, "stop": self.stop_sequences or None}


async def count_tokens(served: Served, http: Request, request: CountRequest) -> Body:
    """Count the tokens of a conversation."""
    _, work = await read_chat(served, http, request)
    return {"input_tokens": work.prompt_tokens}


def _messages(message: AnthropicMessage) -> list[Body]:
    """Write a message as chats have it: results are messages of their own, before what is said with them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    blocks = message.content
    results = [
        # As a template shows it: none has a place of its own for failures.
        {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": ("Error: " if block.is_error else "") + in_one_piece(block.content),
        }
        for block in blocks
        if block.type == "tool_result"
    ]
    calls = [called(each.id, each.name, json.dumps(each.input)) for each in blocks if each.type == "tool_use"]
    text = "".join(block.text for block in blocks)
    thought = "".join(block.thinking for block in blocks) or None
    said: Body = {"role": message.role, "content": text, "reasoning_content": thought, "tool_calls": calls or None}
    return [*results, said] if text or calls or thought or not results else list(results)


_BLOCKS: dict[str, Body] = {
    "text": {"type": "text", "text": ""},
    "thought": {"type": "thinking", "thinking": "", "signature": ""},
}
_GROWS = {"text": ("text", "text"), "thought": ("thinking", "thinking")}


class MessageForm(ItemsForm):
    """A message: blocks in order, one for text and one for each call."""

    def __init__(self, served: Served, work: Work) -> None:
        super().__init__()
        self._prompt_tokens = work.prompt_tokens
        self._head = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": served.name}
        # Of the block that is written.
        self._index = -1

    def whole(self, choices: Sequence[Choice], counts: Counts) -> Body:
        choice = choices[0]
        said: list[Body] = [{**_BLOCKS["thought"], "thinking": choice.thought}] if choice.thought else []
        said += [{"type": "text", "text": choice.text}] if choice.text or not choice.calls else []
        content = [*said, *({**_use(call), "input": parsed(call)} for call in choice.calls)]
        return {**self._head, "content": content, **_ending(choice), "usage": self._usage(counts)}

    def begin(self) -> Iterable[str]:
        begun: Body = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        return [_event("message_start", message={**begun, "usage": self._usage(Counts())})]

    def end(self, choices: Sequence[Choice], counts: Counts) -> Iterable[str]:
        yield from self.closed()
        yield _event("message_delta", delta=_ending(choices[0]), usage=self._usage(counts))
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterable[str]:
        yield event(error.body, "error")

    def opened(self, item: Item) -> Iterable[str]:
        self._index += 1
        block = {**_use(item), "input": {}} if isinstance(item, ToolCall) else _BLOCKS[item]
        yield _event("content_block_start", index=self._index, content_block=block)

    def grown(self, new: str, item: Item) -> Iterable[str]:
        kind, field = ("input_json", "partial_json") if isinstance(item, ToolCall) else _GROWS[item]
        yield _event("content_block_delta", index=self._index, delta={"type": f"{kind}_delta", field: new})

    def finished(self, item: Item) -> Iterable[str]:
        yield _event("content_block_stop", index=self._index)

    def _usage(self, counts: Counts) -> Body:
        return {
            "input_tokens": self._prompt_tokens - counts.cached,
            "output_tokens": counts.tokens,
            "cache_read_input_tokens": counts.cached,
            "cache_creation_input_tokens": 0,
        }


def _event(kind: str, /, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)


def _use(call: ToolCall) -> Body:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _ending(choice: Choice) -> Body:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    reason = "stop_sequence" if choice.stop_string is not None else reasons.get(str(choice.finish_reason), "end_turn")
    return {"stop_reason": reason, "stop_sequence": choice.stop_string}
