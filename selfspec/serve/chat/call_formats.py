"""Formats of tool calls that models are taught, each declared once; a format more is an entry more of a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tags:
    """How arguments are written as text between tags: each as `before` KEY `between` VALUE `after`."""

    before: str
    between: str
    after: str


@dataclass(frozen=True)
class CallFormat:
    """How calls are written: `begin`, then each as `before` NAME `between` ARGUMENTS `after`, then `end`.

    Readers take any white space where these have some.

    Attributes:
        separator: between two calls; None: an answer makes one call.
        tags: that arguments are written with; None: as JSON.
        opening: regular expression of all that may stand before a name or an object, where that is more than `begin`
            and `before`; `joint`: of what may stand in place of `between`.
    """

    before: str
    between: str
    after: str
    begin: str = ""
    end: str = ""
    separator: str | None = ""
    tags: Tags | None = None
    opening: str | None = None
    joint: str | None = None

    @property
    def is_object(self) -> bool:
        """True where name and arguments are in one object."""
        return "{" in self.before

    @property
    def marks(self) -> str:
        """All that it writes besides names and arguments."""
        patterns = f"{self.opening}{self.joint}".replace("\\", "")
        written = (self.begin, self.before, self.between, self.after, self.end, self.separator or "")
        return "".join(written) + patterns


@dataclass(frozen=True)
class ResponseFormat:
    """How calls are written, as the field `tool_calls` of a response template of transformers says."""

    template: Mapping[str, Any]

    @property
    def marks(self) -> str:
        """All that it may write besides names and arguments."""
        # Patterns, as what they match.
        calls = json.dumps(self.template["fields"]["tool_calls"], ensure_ascii=False)
        return calls.replace("[|]", "|").replace("\\", "")


HERMES = CallFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n")
"""Format of models whose template tells them of tools and writes no calls."""

_NAME, _ARGUMENTS, _PARAMETERS = '{"name": "', '", "arguments": ', '", "parameters": '

FORMATS = (
    # Hermes, Qwen, Granite 4, SmolLM3.
    HERMES,
    # Qwen3-Coder, Qwen3.5, Nemotron 3. Some answers leave the outer tag out.
    CallFormat(
        *("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "", "", "\n"),
        Tags("<parameter=", ">\n", "\n</parameter>\n"),
        r"(?:<tool_call>\s*)?<function=",
    ),
    # Llama 3, and others that write an object and nothing else.
    CallFormat(*(_NAME, _PARAMETERS, "}"), separator=None, opening=r"(?:<\|python_tag\|>|(?<=\A\s*|</think>\s*))"),
    CallFormat(_NAME, _ARGUMENTS, "}", separator=None),
    # Mistral: a list, and from its tokenizer's version 11 on names.
    CallFormat(_NAME, _ARGUMENTS, "}", "[TOOL_CALLS] [", "]", ", ", opening=r"\[TOOL_CALLS\]"),
    CallFormat("[TOOL_CALLS]", "[ARGS]", "", joint=r"(?:\[CALL_ID\]\w*)?\[ARGS\]"),
    # DeepSeek R1 and V3, and V3.1.
    CallFormat(
        *("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "\n"),
    ),
    CallFormat(
        *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    # gpt-oss: a channel addressed to a function. Its end token follows, so one call is an answer.
    CallFormat(
        *("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
        separator=None,
        opening=r"(?:(?:<\|end\|>)?<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))?\s*to=functions\.",
        joint=r"(?:<\|channel\|>(?:commentary|analysis))?\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>",
    ),
)
"""A template's is the first that writes as it does, or that reads what it writes."""


def _braced(opened: str, closed: str, quote: str) -> ResponseFormat:
    """Calls whose arguments are an object without quotes, strings between marks of their own."""
    return ResponseFormat(
        {
            "start_anchor": opened,
            "fields": {
                "tool_calls": {
                    "open_pattern": rf"{opened.replace('|', '[|]')}call:(?P<name>[\w.-]+)",
                    "close": closed,
                    "repeats": True,
                    "content": "json",
                    "content_args": {"unquoted_keys": True, "string_delims": [[quote, quote]]},
                    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
                }
            },
        }
    )


RESPONSES = (
    # FunctionGemma, and Gemma 4.
    _braced("<start_function_call>", "<end_function_call>", "<escape>"),
    _braced("<|tool_call>", "<tool_call|>", '<|"|>'),
)
"""Those that only a parser of transformers reads: no grammar forces them."""
