"""Finds calls of tools in an answer that comes piece by piece."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import regex
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from selfspec.serve.chat.call_formats import CallFormat, ResponseFormat, Tags

_Found = TypeVar("_Found")
_Reading = Generator[None, None, _Found]
"""Yields where it needs more text."""


@dataclass
class ToolCall:
    """A call that an answer makes, as far as it is written; `arguments` are JSON, or what the model takes for that."""

    name: str
    arguments: str = ""
    # Some templates take ids of nine letters alone.
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:9])


@dataclass(frozen=True)
class CallDelta:
    """What is new of a call: some of its arguments, its beginning, its end."""

    call: ToolCall
    index: int
    arguments: str
    begins: bool
    ends: bool


@dataclass(frozen=True)
class Said:
    """What is new of an answer: text, and calls."""

    text: str
    calls: tuple[CallDelta, ...]


@dataclass(frozen=True)
class _Marks:
    """What a reader looks for.

    `first` begins a call in text, up to its arguments; `again` begins one right behind another. `body` follows: an
    object of arguments (None), tags, or what a function reads once all of the call is there. `ends` may follow.
    """

    first: Any
    again: Any
    body: Tags | Callable[[str], list[Any]] | None
    ends: tuple[Any, ...]


def _loose(literal: str) -> str:
    """Make a pattern of a literal that takes any white space where it has some."""
    return r"\s*".join(map(regex.escape, regex.split(r"\s+", literal)))


def _pattern(text: str) -> Any:
    """Compile a pattern that is searched again with each token: what an answer has no end of is not held back."""
    return regex.compile(text.replace(r"\s*", r"\s{0,64}+"), regex.DOTALL)


_ARGUMENTS = ("arguments", "parameters", "args")
# What stands in an object before its name, between that and its arguments, and behind these; some leave its end out.
_HEAD = r'\{\s*(?:"(?:id|type)"\s*:\s*"[^"]{0,256}"\s*,\s*|"function"\s*:\s*\{\s*)*"name"\s*:\s*"'
_JOINT = rf'"\s*,\s*"(?:{"|".join(_ARGUMENTS)})"\s*:\s*'
_TAIL = r"(?:,[^{}]{0,256})?\}"


def _marks(form: CallFormat, names: Collection[str]) -> _Marks:
    """Return what a reader of a format looks for, of calls of these tools."""
    lead, _, _ = form.before.partition("{")
    begin = form.begin.rstrip().removesuffix("[")
    name = rf"(?P<name>{'|'.join(map(regex.escape, names)) or '(?!)'})"
    behind = "" if form.tags else r"\s*(?=\{)"
    if form.is_object:
        inner, after = rf"\s*\[?\s*{_HEAD}{name}{_JOINT}{behind}", form.after.rpartition("}")[2]
    else:
        inner, after = rf"{name}\s*{form.joint or _loose(form.between)}{behind}", form.after
    opening = form.opening or (rf"(?:{_loose(begin)})?{_loose(lead)}" if lead.strip() else _loose(begin))
    if not opening:
        # Only what an answer begins with may be a call.
        opening = r"(?<=\A\s*|</think>\s*)"
    further = rf"(?:{opening})?" if form.is_object else opening
    ends = [_TAIL, r"\}", r"\]"] if form.is_object else []
    ends += [_loose(each.strip()) for each in (after, form.end.strip().removeprefix("]")) if each.strip()]
    return _Marks(
        _pattern(rf"\s*{opening}{inner}"),
        _pattern(rf"[\s,;]{{0,64}}{further}{inner}"),
        form.tags,
        tuple(_pattern(rf"\s*{each}") for each in ends),
    )


def _response_marks(form: ResponseFormat, tools: Mapping[str, Mapping[str, Any]]) -> _Marks:
    """Return the marks of a response template: transformers reads the calls between them, each once it is whole."""
    calls = load_response_template(dict(form.template)).fields["tool_calls"]
    given = [{"type": "function", "function": {"name": name, "parameters": tools[name]}} for name in tools]
    patterns = (r"(?!)" if each is None else each.pattern for each in (calls.open_re, calls.close_re))
    opened, closed = (each.replace(r"\s*", r"\s{0,64}") for each in patterns)

    def parse(text: str) -> list[Any]:
        found = parse_response(text, dict(form.template), prefix="", tools=given).get("tool_calls") or []
        return [each for item in found for each in (item if isinstance(item, list) else [item])]

    # What may grow waits for what follows.
    first = _pattern(rf"\s*(?:{opened})(?=.|\Z)")
    return _Marks(first, first, parse, (_pattern(rf"\s*(?:{closed})"),))


class CallReader:
    """Reads an answer that comes piece by piece: text, and calls of tools, each with the schema of its arguments.

    A call begins once its name and the beginning of its arguments are there, and what follows is sent as it comes.
    Tokens' texts that are `special` are no text where they are in no call.
    """

    def __init__(
        self, form: CallFormat | ResponseFormat, tools: Mapping[str, Mapping[str, Any]], special: Iterable[str] = ()
    ) -> None:
        self._tools = tools
        self._marks = _marks(form, tools) if isinstance(form, CallFormat) else _response_marks(form, tools)
        self._special = _pattern("|".join(map(regex.escape, special)) or "(?!)")
        self._count = 0
        # The answer, how far it is read, and what came of it.
        self._text = self._said = ""
        self._at = 0
        self._ended = False
        self._deltas: list[CallDelta] = []
        self._parser = self._parse()

    def push(self, text: str, ended: bool = False) -> Said:
        """Take text, the last if it has `ended`; return what is now known."""
        self._text, self._ended = self._text + text, ended
        self._said, self._deltas = "", []
        next(self._parser)
        return Said(self._said, tuple(self._deltas))

    def _parse(self) -> _Reading[None]:
        while True:
            call = self._marks.first.search(self._text, self._at, partial=not self._ended)
            special = self._special.search(self._text, self._at, partial=not self._ended)
            found = min(filter(None, (call, special)), key=lambda each: each.start(), default=None)
            self._say(len(self._text) if found is None else found.start())
            if found is None or found.partial:
                yield
            elif found is call:
                yield from self._calls(call)
            else:
                self._at = found.end()

    def _calls(self, found: Any) -> _Reading[None]:
        """Read calls, the first of which begins as was found, up to what is none."""
        while found is not None:
            begun, self._at = self._at, found.end()
            if not (yield from self._call(found)):
                # It began as a call, and is text.
                self._at = begun
                self._say(max(found.end(), begun + 1))
                return
            for end in self._marks.ends:
                yield from self._passed(end)
            found = yield from self._met(self._marks.again)
        # White space behind calls is none of the text.
        while not (rest := self._text[self._at :].lstrip()) and not self._ended:
            self._at = len(self._text)
            yield
        self._at = len(self._text) - len(rest)

    def _call(self, found: Any) -> _Reading[bool]:
        """Read a call and say whether it is one."""
        body = self._marks.body
        if body is not None and not isinstance(body, Tags):
            return (yield from self._at_once(found, body))
        call = ToolCall(found["name"])
        self._count += 1
        self._grow(call, "", begins=True)
        if body is not None:
            yield from self._tagged(call, body)
        else:
            yield from self._balanced(call)
        return True

    def _at_once(self, found: Any, parse: Callable[[str], list[Any]]) -> _Reading[bool]:
        """Read a call that is known once all of it is there."""
        (close,) = self._marks.ends
        while True:
            closed = close.search(self._text, self._at, partial=not self._ended)
            if (closed is not None and not closed.partial) or self._ended:
                break
            self._at = len(self._text) if closed is None else closed.start()
            yield
        self._at = len(self._text) if closed is None else closed.end()
        try:
            return self._add(parse(self._text[found.start() : self._at]))
        # Whatever a template's patterns and the parsers that it names make of another text than they expect.
        except (ValueError, LookupError, TypeError, AttributeError):
            return False

    def _add(self, calls: list[Any]) -> bool:
        """Take calls that are whole, unless one of them is none of the tools'."""
        found = [_named(call.get("function", call)) for call in calls if isinstance(call, dict)]
        known = [call for call in found if call is not None and call.name in self._tools]
        if not known or len(known) < len(calls):
            return False
        for call in known:
            self._count += 1
            self._grow(call, "", begins=True, ends=True)
        return True

    def _balanced(self, call: ToolCall) -> _Reading[None]:
        """Read the JSON of a call's arguments, until its brackets are closed."""
        quoted, escaped, depth = False, False, 0
        while True:
            begun = self._at
            for at in range(begun, len(self._text)):
                letter = self._text[at]
                if quoted:
                    quoted, escaped = escaped or letter != '"', not escaped and letter == "\\"
                elif letter == '"':
                    quoted = True
                else:
                    depth += (letter in "[{") - (letter in "]}")
                    if depth == 0:
                        self._at = at + 1
                        self._grow(call, self._text[begun : self._at], ends=True)
                        return
            self._at = len(self._text)
            self._grow(call, self._text[begun:])
            if self._ended:
                return
            yield

    def _tagged(self, call: ToolCall, tags: Tags) -> _Reading[None]:
        """Read arguments between tags, each sent as JSON once it is whole."""
        self._grow(call, "{")
        types = self._tools[call.name].get("properties", {})
        key = _pattern(rf"\s*{_loose(tags.before)}(?P<key>[^<>\n]{{0,256}}?)\s*{_loose(tags.between.strip())}")
        after, count = tags.after.strip(), 0
        while (found := (yield from self._met(key))) is not None:
            begun = self._at = found.end()
            while (end := self._text.find(after, self._at)) < 0:
                if self._ended:
                    self._at = len(self._text)
                    return
                self._at = max(begun, len(self._text) - len(after))
                yield
            self._at = end + len(after)
            value = self._text[begun:end].removeprefix("\n").removesuffix("\n")
            name = found["key"].strip()
            written = f"{json.dumps(name)}: {json.dumps(_typed(value, types.get(name, {})), ensure_ascii=False)}"
            self._grow(call, (", " if count else "") + written)
            count += 1
        if (yield from self._met(self._marks.ends[0])) is None and self._ended:
            # It is cut off: more might have come.
            self._at = len(self._text)
        else:
            self._grow(call, "}", ends=True)

    def _met(self, pattern: Any) -> _Reading[Any]:
        """Return the match of a pattern here, once it is certain; None: there is none."""
        while (found := pattern.match(self._text, self._at, partial=not self._ended)) is not None and found.partial:
            yield
        return found

    def _passed(self, pattern: Any) -> _Reading[None]:
        """Pass over what matches here, if it does."""
        found = yield from self._met(pattern)
        if found is None and self._ended:
            # What is cut off is none of the text.
            found = pattern.match(self._text, self._at, partial=True)
        self._at = self._at if found is None else found.end()

    def _grow(self, call: ToolCall, arguments: str, begins: bool = False, ends: bool = False) -> None:
        """Send what is new of a call, in one piece with what else is new of it."""
        call.arguments += arguments
        new = call.arguments if begins else arguments
        last = self._deltas[-1] if self._deltas else None
        if last is not None and last.call is call:
            self._deltas[-1] = replace(last, arguments=last.arguments + arguments, ends=ends)
        elif arguments or begins or ends:
            self._deltas.append(CallDelta(call, self._count - 1, new, begins, ends))

    def _say(self, end: int) -> None:
        """Take all up to a place as text."""
        self._said += self._special.sub("", self._text[self._at : end])
        self._at = max(self._at, end)


@dataclass(frozen=True)
class CallableTools:
    """Tools that an answer may call, with the special tokens `shown` that calls are written with."""

    form: CallFormat | ResponseFormat
    schemas: Mapping[str, Mapping[str, Any]]
    shown: Mapping[int, str]

    def reader(self) -> CallReader:
        """Make what reads one answer."""
        return CallReader(self.form, self.schemas, [*self.shown.values()])


def _named(value: Any) -> ToolCall | None:
    """Read a call out of an object that has its name and its arguments, in whatever words; None: it is none."""
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = next((value[key] for key in _ARGUMENTS if key in value), None)
    written = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
    return ToolCall(name, written) if isinstance(name, str) and isinstance(written, str) else None


_WORDS = {"True": True, "False": False, "None": None}
_TYPES: Mapping[type, Collection[str]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Read a value that was written as text: JSON, or as in Python, of a type that it may have; else a string."""
    stripped = text.strip()
    if stripped in (*schema.get("enum", ()), schema.get("const")):
        return stripped
    try:
        value = _WORDS[stripped] if stripped in _WORDS else json.loads(text)
    except ValueError:
        return text
    types = _types(schema)
    return value if not types or not types.isdisjoint(_TYPES[type(value)]) else text


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names."""
    named = schema.get("type", ())
    inner = [each for union in ("anyOf", "oneOf") for each in schema.get(union, ()) if isinstance(each, Mapping)]
    return {*([named] if isinstance(named, str) else named)}.union(*map(_types, inner))
