"""A chat's messages to the tokens of a prompt, by a template, and what the template reads of them, found by trials."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from selfspec.decode.text_stream import shared_length
from selfspec.errors import CheckpointError, PromptError
from selfspec.serve.chat.call_formats import FORMATS, HERMES, RESPONSES, CallFormat, ResponseFormat
from selfspec.serve.chat.call_reader import CallableTools, CallReader
from selfspec.serve.chat.thoughts import MARKS, Marks, Thoughts

Message = Mapping[str, Any]
"""`role`, `content`, and what else a template may read."""

Reading = Literal["text", "parts"]

_TRIAL: tuple[Message, ...] = ({"role": "user", "content": "Hello"},)

_SAID = "qx_said"

# What a trial calls, and what it hands over. No call begins with the text in its place.
_NAME, _ARGUMENTS, _TEXT = "qx_tool", {"qx_key": "qx value"}, "~"

_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "a",
        "parameters": {"type": "object", "properties": {"qx_key": {"type": "string", "description": "a"}}},
    },
}

# What transformers itself hands to templates, and what a request says otherwise.
_GIVEN = ("messages", "tools", "add_generation_prompt", "documents", "continue_final_message")


@dataclass(frozen=True)
class ChatTemplate:
    """Writes messages the way the model was taught to read them, by a template in Jinja; None: the tokenizer's own.

    Of templates with names, `default` and `tool_use`, the latter writes what has tools or calls. A CheckpointError
    names the remedy: there is none, or it cannot be rendered, or leaves out what a user says.
    """

    tokenizer: PreTrainedTokenizerBase
    source: str | None = None

    def __post_init__(self) -> None:
        if self.source is None and not self.tokenizer.chat_template:
            raise CheckpointError(
                "the checkpoint has no chat template, so nothing says how it was taught to read messages; give one "
                "with --template FILE (Jinja, as in tokenizer_config.json), or continue text with `selfspec generate`"
            )
        try:
            self.prompt(_TRIAL)
        except PromptError as error:
            raise CheckpointError(f"the chat template does not write one message of a user: {error}") from error
        if self._own is not None:
            try:
                CallReader(self._own, {})
            except (ValueError, LookupError) as error:
                raise CheckpointError(f"the tokenizer's response_template cannot be read: {error}") from error

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        goes_on: bool = False,
        begins: bool = True,
    ) -> list[int]:
        """Write the tokens of a conversation, up to where the model's answer begins.

        Arguments of calls in `messages` are objects. The answer continues the last message if it `goes_on`; else its
        beginning is written if it `begins`. A PromptError: the template refuses these messages, or leaves out calls, or
        what a message says.
        """
        calls = any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
        source = self.writers[bool(tools) or calls]
        if calls and source.arguments is None:
            raise PromptError("the chat template writes no calls and results; give one with --template FILE")
        if calls and source.arguments == "text":
            messages = [_as_text(message) for message in messages]
        return source.tokens(messages, tools or (), variables, begins and not goes_on, goes_on)

    @cached_property
    def writers(self) -> Mapping[bool, TemplateSource]:
        """The templates that write what has tools or calls, and neither."""
        found = self.source or self.tokenizer.chat_template
        named = found if isinstance(found, dict) else {"default": found}
        if "default" not in named:
            names = ", ".join(sorted(named))
            raise PromptError(f"it has templates named {names}, and none 'default'; give one with --template FILE")
        plain = TemplateSource(self.tokenizer, named["default"])
        return {False: plain, True: TemplateSource(self.tokenizer, named["tool_use"]) if "tool_use" in named else plain}

    @cached_property
    def reads(self) -> CallFormat | ResponseFormat | None:
        """How calls are found in answers: as the template writes them, or as the tokenizer's response template says."""
        writer = self.writers[True]
        return writer.calls if self._own is None or (writer.arguments and writer.calls) else self._own

    @cached_property
    def _own(self) -> ResponseFormat | None:
        found = getattr(self.tokenizer, "response_template", None) if self.source is None else None
        return ResponseFormat(found) if found and "tool_calls" in found.get("fields", ()) else None

    def callable(self, schemas: Mapping[str, Mapping[str, Any]]) -> CallableTools | None:
        """Return what finds calls of tools, by names and schemas of arguments; None: no calls can be found."""
        form = self.reads
        return None if form is None else CallableTools(form, schemas, self._special_of(form.marks))

    def thoughts(self, prompt: Sequence[int], tools: bool) -> Thoughts | None:
        """Return the marks that part the thoughts of an answer from its text; None: the model writes none."""
        marks = self.writers[tools].thinks
        if marks is None:
            return None
        begun = str(self.tokenizer.decode(prompt[-32:])).rstrip().endswith(marks.begin)
        return Thoughts(marks, frozenset(self._special_of("".join((marks.begin, marks.end, *marks.lead)))), begun)

    def _special_of(self, marks: str) -> dict[int, str]:
        """Return the special tokens that are in marks, with their texts."""
        special = zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens, strict=True)
        return {token: text for token, text in special if text in marks}


def _as_text(message: Message) -> Message:
    """Write arguments of calls as JSON text."""
    calls = deepcopy(message.get("tool_calls"))
    for call in calls or ():
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**message, "tool_calls": calls} if calls else message


@dataclass(frozen=True)
class TemplateSource:
    """Writes messages by `source`; `tokens` raises a PromptError where the template refuses them."""

    tokenizer: PreTrainedTokenizerBase
    source: str

    def tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        variables: Mapping[str, Any],
        begins: bool,
        goes_on: bool,
    ) -> list[int]:
        """Write the tokens of messages; an answer begins behind them, or the last one goes on."""
        shaped = [dict(message, content=self._shaped(message["role"], message["content"])) for message in messages]
        written = self._applied(
            shaped, tools, variables, tokenize=True, add_generation_prompt=begins, continue_final_message=goes_on
        )
        return [int(token) for token in written]

    @cached_property
    def reads_tools(self) -> bool:
        """True where it tells the model of tools."""
        return _NAME in (self._tried([self._message("user", "Hello")], [_TOOL]) or "")

    @cached_property
    def reads_names(self) -> bool:
        """True where it reads the name of a message's author."""
        return _NAME in (self._tried([self._message("user", "Hello", name=_NAME)]) or "")

    @property
    def arguments(self) -> Literal["objects", "text"] | None:
        """As what it takes arguments of calls; None: it does not write calls and what they gave."""
        return next(iter(self._call), None)

    @cached_property
    def calls(self) -> CallFormat | ResponseFormat | None:
        """In which of the known formats it writes calls; None: in another."""
        if not self._call:
            return HERMES
        (written,) = self._call.values()
        return next((form for form in (*FORMATS, *RESPONSES) if _reads(form, written)), None)

    @cached_property
    def _call(self) -> Mapping[Literal["objects", "text"], str]:
        """As what it takes arguments, and what it writes of a call and its result; empty: not all of that."""
        question = self._message("user", "Hello")
        result = {"role": "tool", "tool_call_id": "qxqxqxqxq", "name": _NAME, "content": _SAID}
        tools = [_TOOL] if self.reads_tools else []
        other = self._tried([question, self._message("assistant", _TEXT)], tools) or ""
        (said,) = _ARGUMENTS.items()
        ways: tuple[Literal["objects", "text"], ...] = ("objects", "text")
        for way in ways:
            function = {"name": _NAME, "arguments": json.dumps(_ARGUMENTS) if way == "text" else _ARGUMENTS}
            call = {"type": "function", "id": "qxqxqxqxq", "function": function}
            text = self._tried([question, self._message("assistant", "", tool_calls=[call]), result], tools) or ""
            # An object that is written as Python does is none of JSON.
            if all(each in text for each in (_NAME, *said, _SAID)) and str(_ARGUMENTS) not in text:
                cut = shared_length(text, other)
                # A tag is not cut.
                opened = text.rfind("<", 0, cut)
                return {way: text[cut if opened < 0 or ">" in text[opened:cut] else opened :]}
        return {}

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of what a request may set."""
        source = self.source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
        parsed = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
        found = meta.find_undeclared_variables(parsed) - self.tokenizer.special_tokens_map.keys()
        return frozenset(found - {*_GIVEN, "raise_exception", "strftime_now", "namespace", "range", "dict"})

    @property
    def thinks(self) -> Marks | None:
        """The marks that it writes around thoughts; None: it writes none."""
        return next((marks for marks in MARKS if (marks.sign or marks.end) in self.source), None)

    @cached_property
    def readings(self) -> Mapping[str, Reading | None]:
        """As what it reads what a role says; None: it leaves that out. What it refuses is text."""
        user = self._reading(lambda said: [{"role": "user", "content": said}])
        hello = {"role": "user", "content": _as("Hello", user)}
        return {
            "user": user,
            "system": self._reading(lambda said: [{"role": "system", "content": said}, hello]),
            "assistant": self._reading(lambda said: [hello, {"role": "assistant", "content": said}, hello]),
        }

    def _reading(self, conversation: Callable[[Any], list[Message]]) -> Reading | None:
        ways: tuple[Reading, ...] = ("text", "parts")
        written = {way: self._tried(conversation(_as(_SAID, way))) for way in ways}
        read = (way for way, text in written.items() if _SAID in (text or "").lower())
        return next(read, "text" if set(written.values()) == {None} else None)

    def _message(self, role: str, said: str, **more: Any) -> Message:
        return {"role": role, "content": self._shaped(role, said), **more}

    def _shaped(self, role: str, content: Any) -> Any:
        reading = self.readings.get(role, "text")
        if reading is None:
            raise PromptError(
                f"the chat template leaves out what a message of the role {role!r} says; give one that reads it with "
                "--template FILE" + ("" if role == "user" else ", or say it in a user's message")
            )
        return _as(content, reading)

    def _tried(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str | None:
        """Write messages, up to where an answer begins if the last is none; None: it refuses them."""
        begins = messages[-1]["role"] != "assistant"
        try:
            return str(self._applied(messages, tools, {}, tokenize=False, add_generation_prompt=begins))
        except PromptError:
            return None

    def _applied(
        self, messages: Sequence[Message], tools: Sequence[Message], variables: Mapping[str, Any], **how: bool
    ) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self.source,
                return_dict=False,
                **how,
                **variables,
            )
        # What a template computes with messages of another shape than it expects may fail in any of these ways.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PromptError(f"the chat template refuses these messages ({reason})") from error


def _as(content: Any, reading: Reading | None) -> Any:
    return [{"type": "text", "text": content}] if reading == "parts" and isinstance(content, str) else content


def _reads(form: CallFormat | ResponseFormat, written: str) -> bool:
    """Return whether a reader of the format finds the trial's call, and no other."""
    calls = CallReader(form, {_NAME: {}}).push(written, ended=True).calls
    ended = [(each.call.name, json.loads(each.call.arguments)) for each in calls if each.ends]
    return ended == [(_NAME, _ARGUMENTS)]
