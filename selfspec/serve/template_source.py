"""One chat template in Jinja: what it writes of messages, and what it reads of them at all, found by trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from selfspec.errors import PromptError
from selfspec.serve.call_learning import ARGUMENTS, NAMES, calling

Message = Mapping[str, Any]
"""`role`, `content`, and what else a template may read."""

_NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
_SAID = "qx_said"
_TOOL = {
    "type": "function",
    "function": {
        "name": NAMES[0],
        "description": "a",
        "parameters": {"type": "object", "properties": {"qx_key": {"type": "string", "description": "a"}}},
    },
}
# What transformers itself hands to templates, and what a request says otherwise.
_GIVEN = ("messages", "tools", "add_generation_prompt", "documents", "continue_final_message")

Reading = Literal["text", "parts"]


@dataclass(frozen=True)
class TemplateSource:
    """Writes messages by `source`; `written` and `tokens` raise a PromptError where the template refuses them."""

    tokenizer: PreTrainedTokenizerBase
    source: str

    def written(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), variables: Mapping[str, Any] = _NO_VARIABLES
    ) -> str:
        """Write messages, up to where an answer begins if the last is none."""
        begins = messages[-1]["role"] != "assistant"
        return str(self._applied(messages, tools, variables, tokenize=False, add_generation_prompt=begins))

    def tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        variables: Mapping[str, Any],
        begins: bool,
        goes_on: bool,
    ) -> list[int]:
        """Write the tokens of messages; an answer begins behind them, or the last one goes on.

        Raises:
            PromptError: the template refuses them, or leaves out what a role says.
        """
        shaped = [dict(message, content=self._shaped(message["role"], message["content"])) for message in messages]
        written = self._applied(
            shaped, tools, variables, tokenize=True, add_generation_prompt=begins, continue_final_message=goes_on
        )
        return [int(token) for token in written]

    @cached_property
    def reads_tools(self) -> bool:
        """Whether it tells the model of tools."""
        return NAMES[0] in (self._tried([self._message("user", "Hello")], [_TOOL]) or "")

    @cached_property
    def reads_names(self) -> bool:
        """Whether it reads the name of a message's author."""
        return NAMES[0] in (self._tried([self._message("user", "Hello", name=NAMES[0])]) or "")

    @cached_property
    def arguments(self) -> Literal["objects", "text"] | None:
        """As what it takes arguments of calls; None: it does not write calls and what they gave."""
        result = {"role": "tool", "tool_call_id": "qxqxqxqxq", "name": NAMES[0], "content": _SAID}
        (key, value), *_ = ARGUMENTS[0].items()
        for way in ("objects", "text"):
            call = calling(ARGUMENTS[0], as_text=way == "text")
            answer = {**call, "content": self._shaped("assistant", "")}
            text = self._tried([self._message("user", "Hello"), answer, result], self.trial_tools) or ""
            # An object that is written as Python does is none of JSON.
            if all(each in text for each in (NAMES[0], key, value, _SAID)) and str(ARGUMENTS[0]) not in text:
                return way
        return None

    @property
    def trial_tools(self) -> list[Message]:
        """Tools to render trials with."""
        return [_TOOL] if self.reads_tools else []

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of what a request may set."""
        source = self.source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
        parsed = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
        special = self.tokenizer.special_tokens_map.keys()
        found = meta.find_undeclared_variables(parsed)
        return frozenset(found - special - {*_GIVEN, "raise_exception", "strftime_now", "namespace", "range", "dict"})

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

    @cached_property
    def reads_system(self) -> bool:
        """Whether it writes what a system message says, before a user's."""
        if self.readings["system"] is None:
            return False
        written = self._tried([self._message("system", _SAID), self._message("user", "Hello")])
        return _SAID in (written or "")

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
        try:
            return self.written(messages, tools)
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
