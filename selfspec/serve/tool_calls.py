"""Calls of tools: how a chat template writes them, read off the template; and reading them in an answer."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from selfspec.serve.stop_strings import StopStrings

_NAMES = ("qx_first_tool", "qx_other_tool")
_BETWEEN = " \n\t,;"
_ARGUMENTS: tuple[dict[str, Any], ...] = ({"qx_key": "qx value"}, {"qx_more": "qx else"})


@dataclass(frozen=True)
class ToolCall:
    """A call that an answer makes; `arguments` are JSON. Some templates take ids of nine letters alone."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:9])


@dataclass(frozen=True)
class CallFormat:
    """How calls are written: `begin`, then each as `before` NAME `between` ARGUMENTS `after`, then `end`.

    Attributes:
        separator: between two calls; None: an answer makes one call.
        arguments_as_text: whether a template takes arguments as JSON text, and not as objects.
        written: whether the template itself writes calls of earlier answers.
    """

    begin: str
    before: str
    between: str
    after: str
    end: str
    separator: str | None
    arguments_as_text: bool = False
    written: bool = True

    @property
    def fragments(self) -> list[str]:
        """What stands around calls, the longest first; what is of an object or a list of them is for JSON to read."""
        parts = [self.begin.strip().removesuffix("["), self.end.strip().removeprefix("]"), self.separator or ""]
        parts += [self.before.partition("{")[0], self.after.rpartition("}")[2]]
        return sorted({part.strip(_BETWEEN) for part in parts} - {""}, key=len, reverse=True)

    @property
    def marker(self) -> str:
        """What says that calls follow; empty: an answer that begins with an object is one."""
        parts = (self.begin.strip().removesuffix("["), self.before.partition("{")[0])
        return next((part.strip() for part in parts if part.strip()), "")

    @property
    def is_object(self) -> bool:
        """Whether name and arguments are in one object."""
        return "{" in self.before

    def text(self, calls: Sequence[tuple[str, str]]) -> str:
        """Write calls, a name and JSON each."""
        each = [f"{self.before}{name}{self.between}{arguments}{self.after}" for name, arguments in calls]
        return self.begin + ("\n" if self.separator is None else self.separator).join(each) + self.end


@dataclass(frozen=True)
class Said:
    """What is new of an answer: text, and calls that are whole."""

    text: str
    calls: tuple[ToolCall, ...]


HERMES = CallFormat("", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "", "\n", written=False)
"""What models are told to write whose template does not say."""


def read_format(render: Callable[[list[dict[str, Any]], bool], str]) -> CallFormat | None:
    """Read off a template how it writes calls; None: it writes them, but not as a name and JSON.

    Args:
        render: writes messages, up to where an answer begins if that is asked for. It may raise.
    """
    question = {"role": "user", "content": "Hello"}

    def answer(**fields: Any) -> str:
        try:
            whole = render([question, {"role": "assistant", "content": "", **fields}], False)
            return whole[len(_shared(whole, render([question], True))) :]
        # Whatever a template does with messages of a shape that it does not expect.
        except Exception:
            return ""

    def calling(count: int, as_text: bool) -> str:
        calls = [
            {"name": name, "arguments": json.dumps(arguments) if as_text else arguments}
            for name, arguments in zip(_NAMES[:count], _ARGUMENTS, strict=False)
        ]
        return answer(tool_calls=[{"type": "function", "id": "qxqxqxqxq", "function": call} for call in calls])

    end = answer(content=_NAMES[0]).partition(_NAMES[0])[2]
    mentioned = False
    for as_text in (False, True):
        one, two = calling(1, as_text), calling(2, as_text)
        mentioned |= _NAMES[0] in one
        first = _placed(one, 0)
        if first is None:
            continue
        lead, between, tail = one[: first.name], one[first.name_end : first.arguments], one[first.end :]
        tail = tail.removesuffix(end).rstrip("\n")
        second = _placed(two, 1) if two.startswith(one[: first.end]) else None
        if second is None:
            return CallFormat("", lead, between, tail, "", None, as_text)
        middle = two[first.end : second.name]
        before = _shared(lead[::-1], middle[::-1])[::-1]
        after = _shared(tail, middle[: len(middle) - len(before)])
        separator = middle[len(after) : len(middle) - len(before)]
        begin = lead[: len(lead) - len(before)]
        return CallFormat(begin, before, between, after, tail[len(after) :], separator, as_text)
    return None if mentioned else HERMES


def _shared(one: str, other: str) -> str:
    """What both begin with."""
    return one[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))]


@dataclass(frozen=True)
class _Place:
    """Where a trial's name begins and ends, and its arguments do."""

    name: int
    name_end: int
    arguments: int
    end: int


def _placed(text: str, number: int) -> _Place | None:
    name = text.find(_NAMES[number])
    name_end = name + len(_NAMES[number])
    for found in re.finditer(r"\{", text[name_end:]) if name >= 0 else ():
        at = name_end + found.start()
        try:
            value, length = json.JSONDecoder().raw_decode(text[at:])
        except ValueError:
            continue
        if value == _ARGUMENTS[number]:
            return _Place(name, name_end, at, at + length)
    return None


class CallReader:
    """Reads an answer that comes piece by piece: text, and calls of the tools of these names."""

    def __init__(self, form: CallFormat, names: frozenset[str]) -> None:
        self._form = form
        self._names = names
        # None: among calls.
        self._before_calls: StopStrings | None = StopStrings([form.marker]) if form.marker else None
        # What is not read yet, and what was read of a call that may yet be none.
        self._held = self._passed = ""

    def push(self, text: str) -> Said:
        """Take text; return what is now known."""
        self._held += text
        said, calls = "", list[ToolCall]()
        while self._held:
            if self._before_calls is not None:
                said += self._before_calls.push(self._held)
                self._held = ""
                if not self._before_calls.found:
                    break
                self._held, self._before_calls = self._before_calls.rest, None
            known = self._next()
            if known is None:
                break
            said, calls = said + known.text, [*calls, *known.calls]
        return Said(said, tuple(calls))

    def finish(self) -> str:
        """The rest, when no more text comes: what was no call."""
        rest = self._passed + self._held if self._held.strip(_BETWEEN) else ""
        return rest if self._before_calls is None else self._before_calls.finish()

    def _next(self) -> Said | None:
        """Read on among calls; None: what is held is not whole."""
        held = self._held.lstrip(_BETWEEN)
        for fragment in self._form.fragments:
            if held.startswith(fragment):
                return self._read(len(self._held) - len(held) + len(fragment))
        if not held or any(fragment.startswith(held) for fragment in self._form.fragments):
            return None
        # Of a list of which each object was read by itself.
        if held[0] == "]" and not self._passed:
            return self._read(len(self._held) - len(held) + 1)
        return self._object(held) if self._form.is_object else self._named(held)

    def _read(self, length: int, *calls: ToolCall) -> Said:
        """Go on behind so many letters."""
        self._passed = "" if calls else self._passed + self._held[:length]
        self._held = self._held[length:]
        return Said("", calls)

    def _text(self) -> Said:
        """What began as a call is text."""
        said, self._held = self._passed + self._held[:1], self._held[1:]
        # Without a marker only what an answer begins with may be a call.
        self._passed, self._before_calls = "", StopStrings([self._form.marker] if self._form.marker else [])
        return Said(said, ())

    def _object(self, held: str) -> Said | None:
        if held[0] not in "[{":
            return self._text()
        try:
            value, end = json.JSONDecoder().raw_decode(held)
        except json.JSONDecodeError as error:
            # What is wrong before its end never becomes right.
            unfinished = error.pos >= len(held) - 6 or error.msg.startswith("Unterminated")
            return None if unfinished else self._text()
        calls = [_call(each) for each in (value if isinstance(value, list) else [value])]
        known = [call for call in calls if call is not None and call.name in self._names]
        if not known or len(known) != len(calls):
            return self._text()
        return self._read(len(self._held) - len(held) + end, *known)

    def _named(self, held: str) -> Said | None:
        between = self._form.between.strip()
        name, found, rest = held.partition(between) if between else (*re.split(r"(?=\{)", held, maxsplit=1), "", "")[:3]
        if name.strip() not in self._names:
            begun = any(each.startswith(held.strip()) or held.strip().startswith(each) for each in self._names)
            return None if begun and not found else self._text()
        arguments = (rest if between else held[len(name) :]).lstrip()
        try:
            value, end = json.JSONDecoder().raw_decode(arguments)
        except json.JSONDecodeError:
            return None
        if not isinstance(value, dict):
            return self._text()
        call = ToolCall(name.strip(), arguments[:end])
        return self._read(len(self._held) - len(arguments) + end, call)


@dataclass(frozen=True)
class CallableTools:
    """Tools that an answer may call.

    Attributes:
        form: how calls are written.
        names: of the tools.
        shown: special tokens that calls are written with.
    """

    form: CallFormat
    names: frozenset[str]
    shown: frozenset[int]

    def reader(self) -> CallReader:
        """Make what reads one answer."""
        return CallReader(self.form, self.names)


def _call(value: Any) -> ToolCall | None:
    """A call that is an object with its name and arguments, by whatever names these have."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = next((value[name] for name in ("arguments", "parameters", "args") if name in value), None)
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(value["name"], arguments) if isinstance(arguments, str) else None


@dataclass(frozen=True)
class CallGrammar:
    """What an answer fits that calls tools, or may.

    Attributes:
        form: how calls are written.
        tools: name and JSON schema of the arguments of each that may be called.
        needed: whether one must be; else text may stand before calls, or alone.
        many: whether several may be, where one must.
        otherwise: the schema that an answer fits which calls none; None: any text.
    """

    form: CallFormat
    tools: Mapping[str, Mapping[str, Any]]
    needed: bool
    many: bool = False
    otherwise: Mapping[str, Any] | None = None
    type: Literal["tools"] = "tools"

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """All that it holds."""
        return [*self.tools.values(), *([] if self.otherwise is None else [self.otherwise])]

    def structural_tag(self) -> dict[str, Any]:
        """In xgrammar's terms."""
        form = self.form
        alone = not self.needed and self.otherwise is None

        def tag(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
            begin, end = f"{form.before}{name}{form.between}", form.after
            # Where text may come first, a call stands alone.
            begin, end = (form.begin + begin, end + form.end) if alone else (begin, end)
            return {"type": "tag", "begin": begin, "content": _json(schema), "end": end}

        tags = [tag(name, schema) for name, schema in self.tools.items()]
        if alone:
            trigger = form.begin + form.before
            return _tagged({"type": "triggered_tags", "triggers": [trigger], "tags": tags})
        calls = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": form.separator or "",
            "at_least_one": True,
            "stop_after_first": not self.many or form.separator is None,
        }
        ends = [{"type": "const_string", "value": text} for text in (form.begin, form.end)]
        parts = [part for part in (ends[0], calls, ends[1]) if part.get("value", "-")]
        sequence = {"type": "sequence", "elements": parts}
        return _tagged(
            sequence if self.otherwise is None else {"type": "or", "elements": [sequence, _json(self.otherwise)]}
        )


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": dict(schema), "max_whitespace_cnt": 1}


def _tagged(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}
