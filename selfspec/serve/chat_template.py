"""A chat's messages to the tokens of a prompt, by the template of the checkpoint or of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from selfspec.errors import CheckpointError, PromptError
from selfspec.serve.tool_calls import HERMES, CallFormat, read_format

Message = Mapping[str, Any]
"""`role`, `content`, and what else a template may read."""

_TRIAL: tuple[Message, ...] = ({"role": "user", "content": "Hello"},)
_NAME = "qx_some_name"
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "a", "parameters": {"type": "object"}}}
# What transformers itself hands to templates, and what a request says otherwise.
_GIVEN = ("messages", "tools", "add_generation_prompt", "documents", "continue_final_message")
_TOOLS_ARE = """You may call these tools, each described as JSON:
{tools}
To call one, answer with its name and its arguments, as in
{call}"""


@dataclass(frozen=True)
class ChatTemplate:
    """Writes messages the way the model was taught to read them, by a template in Jinja; None: the tokenizer's own.

    Where a template reads no tools or calls, they are described in messages: see `prompt`.

    Raises:
        CheckpointError: there is none, or it cannot be rendered; the message names the remedy.
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

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        goes_on: bool = False,
        begins: bool = True,
    ) -> list[int]:
        """Write the tokens of a conversation, up to where the model's answer begins.

        Args:
            messages: arguments of calls are objects.
            tools: JSON schemas of functions as OpenAI's `tools`. Where the template reads none, the system message
                describes them; where it writes no calls and results, they are written as text.
            variables: of the template, by name.
            goes_on: whether the answer continues the last message, in place of one that follows.
            begins: whether an answer's beginning is written behind the messages.

        Raises:
            PromptError: the template refuses these messages.
        """
        tools = tools or ()
        if any(message.get("tool_calls") or message["role"] == "tool" for message in messages) or tools:
            messages = self._with_tools([dict(message) for message in messages], tools)
            tools = tools if self.reads_tools else ()
        return [
            int(token) for token in self._written(messages, tools, variables, begins and not goes_on, True, goes_on)
        ]

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of what a request may set in the template."""
        source = self.source if self.source is not None else self.tokenizer.get_chat_template(tools=[_TOOL])
        parsed = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(
            _without_generation(source)
        )
        special = self.tokenizer.special_tokens_map.keys()
        found = meta.find_undeclared_variables(parsed)
        return frozenset(found - special - {*_GIVEN, "raise_exception", "strftime_now", "namespace", "range", "dict"})

    @cached_property
    def reads_tools(self) -> bool:
        """Whether the template tells the model of tools."""
        return _NAME in self._tried(_TRIAL, tools=[_TOOL])

    @cached_property
    def reads_names(self) -> bool:
        """Whether it reads the name of a message's author."""
        return _NAME in self._tried([{**_TRIAL[0], "name": _NAME}])

    @cached_property
    def calls(self) -> CallFormat | None:
        """How the model writes calls; None: not as a name and JSON."""

        def render(messages: list[dict[str, Any]], prompt: bool) -> str:
            return str(self._written(messages, (), MappingProxyType({}), prompt, False))

        return read_format(render)

    @cached_property
    def call_tokens(self) -> frozenset[int]:
        """Special tokens that calls are written with."""
        form = self.calls or HERMES
        written = form.text([("", "")]) + (form.separator or "")
        special = zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True)
        return frozenset(token for text, token in special if text in written)

    def _tried(self, messages: Sequence[Message], **more: Any) -> str:
        try:
            return str(self._written(messages, more.get("tools", ()), MappingProxyType({}), True, False))
        except PromptError:
            return ""

    def _with_tools(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages with all that the template would not write of tools, calls and results."""
        form = self.calls
        if form is not None and not form.written:
            messages = [_in_words(message, form) for message in messages]
        elif form is not None and form.arguments_as_text:
            messages = [_as_text(message) for message in messages]
        if not tools or self.reads_tools:
            return messages
        described = _TOOLS_ARE.format(
            tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools),
            call=(form or HERMES).text([("NAME", "ARGUMENTS")]),
        )
        first, system = messages[0], {"role": "system", "content": described}
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{described}"}, *messages[1:]]
        if described in self._tried([system, *_TRIAL]):
            return [system, *messages]
        return [{**first, "content": f"{described}\n\n{first['content']}"}, *messages[1:]]

    def _written(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        variables: Mapping[str, Any],
        answer_begins: bool,
        tokens: bool,
        goes_on: bool = False,
    ) -> Any:
        """Render as text or tokens."""
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self.source,
                add_generation_prompt=answer_begins,
                continue_final_message=goes_on,
                tokenize=tokens,
                return_dict=False,
                **variables,
            )
        # What a template computes with messages of another shape than it expects may fail in any of these ways.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PromptError(f"the chat template refuses these messages ({reason})") from error


def _in_words(message: dict[str, Any], form: CallFormat) -> dict[str, Any]:
    """Calls and results as text, in a message without any."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [call["function"] for call in message.pop("tool_calls", ())]
    if calls:
        text = form.text([(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in calls])
        message["content"] = "\n".join(part for part in (message["content"], text) if part)
    return message


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments of calls as JSON text."""
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return message


def _without_generation(source: str) -> str:
    """A template without the marks of transformers around what the model wrote."""
    return source.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def read_template(file: Path) -> str:
    """A template from a file.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeError as error:
        raise CheckpointError(f"--template {file} is not UTF-8 text ({error}); convert it first") from error
    except OSError as error:
        raise CheckpointError(f"--template {file} cannot be read: {error.strerror or error}") from error
