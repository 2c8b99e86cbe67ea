"""A chat's messages to the tokens of a prompt, by the template of the checkpoint or of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.errors import CheckpointError, PromptError
from selfspec.serve.call_formats import HERMES, CallFormat, ResponseFormat
from selfspec.serve.call_learning import find_format
from selfspec.serve.call_reader import CallableTools, CallReader
from selfspec.serve.template_source import Message, TemplateSource

_TRIAL: tuple[Message, ...] = ({"role": "user", "content": "Hello"},)
_TOOLS_ARE = """You may call these tools, each described as JSON:
{tools}
To call one, answer with its name and its arguments, as in
{call}"""


@dataclass(frozen=True)
class ChatTemplate:
    """Writes messages the way the model was taught to read them, by a template in Jinja; None: the tokenizer's own.

    Of templates with names, `default` and `tool_use`, the latter writes what has tools. Where a template reads no tools
    or calls, they are described in messages: see `prompt`.

    Raises:
        CheckpointError: there is none, or it cannot be rendered, or leaves out what a user says; the message names the
            remedy.
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

        Args:
            messages: arguments of calls are objects.
            tools: JSON schemas of functions as OpenAI's `tools`. Where the template reads none, the system message
                describes them; where it writes no calls and results, they are written as text.
            variables: of the template, by name.
            goes_on: whether the answer continues the last message, in place of one that follows.
            begins: whether an answer's beginning is written behind the messages.

        Raises:
            PromptError: the template refuses these messages, or leaves out what one of them says.
        """
        tools, source = tools or (), self.writer(bool(tools))
        if any(message.get("tool_calls") or message["role"] == "tool" for message in messages) or tools:
            messages = self._with_tools(source, [dict(message) for message in messages], tools)
            tools = tools if source.reads_tools else ()
        return source.tokens(messages, tools, variables, begins and not goes_on, goes_on)

    def writer(self, tools: bool) -> TemplateSource:
        """Return the template that writes what has tools, or has none."""
        return self._calling if tools else self._plain

    @cached_property
    def _plain(self) -> TemplateSource:
        named = self.source or self.tokenizer.chat_template
        if isinstance(named, dict):
            if "default" not in named:
                names = ", ".join(sorted(named))
                raise PromptError(f"it has templates named {names}, and none 'default'; give one with --template FILE")
            named = named["default"]
        return TemplateSource(self.tokenizer, named)

    @cached_property
    def _calling(self) -> TemplateSource:
        named = self.source or self.tokenizer.chat_template
        found = named.get("tool_use") if isinstance(named, dict) else None
        return self._plain if found is None else TemplateSource(self.tokenizer, found)

    @cached_property
    def calls(self) -> CallFormat | ResponseFormat | None:
        """How the model writes calls; None: in a way that is not known."""
        source = self._calling

        def render(messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
            return source.written(messages, source.trial_tools, variables)

        return find_format(render, source.source)

    @cached_property
    def reads(self) -> CallFormat | ResponseFormat | None:
        """How calls are found in answers: as the tokenizer's response template says, where it has one."""
        return self._own or self.calls

    @cached_property
    def _own(self) -> ResponseFormat | None:
        found = getattr(self.tokenizer, "response_template", None) if self.source is None else None
        return ResponseFormat(found) if found and "tool_calls" in found.get("fields", ()) else None

    def callable(self, schemas: Mapping[str, Mapping[str, Any]]) -> CallableTools | None:
        """Return what finds calls of tools, by names and schemas of arguments; None: no calls can be found."""
        form = self.reads
        if form is None:
            return None
        special = zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens, strict=True)
        return CallableTools(form, schemas, {token: text for token, text in special if text in form.marks})

    def _with_tools(
        self, source: TemplateSource, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Messages with all that the template would not write of tools, calls and results."""
        form = self.calls if isinstance(self.calls, CallFormat) else HERMES
        if source.arguments is None:
            messages = [_in_words(message, form) for message in messages]
        elif source.arguments == "text":
            messages = [_as_text(message) for message in messages]
        if not tools or source.reads_tools:
            return messages
        described = _TOOLS_ARE.format(
            tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools),
            call=form.text([("NAME", "ARGUMENTS")]),
        )
        first, system = messages[0], {"role": "system", "content": described}
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{described}"}, *messages[1:]]
        if source.reads_system:
            return [system, *messages]
        return [{**first, "content": f"{described}\n\n{first['content']}"}, *messages[1:]]


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
