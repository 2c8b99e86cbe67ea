"""Calls of tools: how a chat template writes them, read off the template; and reading them in an answer."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal

from selfspec.serve.stop_strings import StopStrings

_NAMES = ("qx_first_tool", "qx_other_tool")
_BETWEEN = " \n\t,;"
_ARGUMENTS: tuple[dict[str, Any], ...] = ({"qx_key": "qx value"}, {"qx_more": "qx else"})


@dataclass
class ToolCall:
    """A call that an answer makes, as far as it is written; `arguments` are JSON, or what the model takes for that.

    Some templates take ids of nine letters alone.
    """

    name: str
    arguments: str = ""
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
class Tags:
    """How arguments are written as text between tags: each as `before` KEY `between` VALUE `after`."""

    before: str
    between: str
    after: str


@dataclass(frozen=True)
class CallFormat:
    """How calls are written: `begin`, then each as `before` NAME `between` ARGUMENTS `after`, then `end`.

    Attributes:
        separator: between two calls; None: an answer makes one call.
        arguments_as_text: whether a template takes arguments as JSON text, and not as objects.
        written: whether the template itself writes calls of earlier answers.
        tags: that arguments are written with; None: as JSON.
    """

    begin: str
    before: str
    between: str
    after: str
    end: str
    separator: str | None
    arguments_as_text: bool = False
    written: bool = True
    tags: Tags | None = None

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


HERMES = CallFormat("", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "", "\n", written=False)
"""What models are told to write whose template does not say."""


def read_format(render: Callable[[list[dict[str, Any]], bool], str]) -> CallFormat | None:
    """Read off a template how it writes calls; None: it writes them, but neither as a name and JSON nor with tags.

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

    def calling(*arguments: dict[str, Any], as_text: bool = False) -> str:
        calls = [
            {"name": name, "arguments": json.dumps(each) if as_text else each}
            for name, each in zip(_NAMES, arguments, strict=False)
        ]
        return answer(tool_calls=[{"type": "function", "id": "qxqxqxqxq", "function": call} for call in calls])

    end = answer(content=_NAMES[0]).partition(_NAMES[0])[2]
    mentioned, tags = False, None
    for as_text in (False, True):
        one, two = (calling(*_ARGUMENTS[:count], as_text=as_text) for count in (1, 2))
        mentioned |= _NAMES[0] in one
        first = _placed(one, 0)
        if first is None and not as_text:
            tags = _tags(one, calling(_ARGUMENTS[0] | _ARGUMENTS[1]))
            first = None if tags is None else _placed(one, 0, tags)
        if first is None:
            continue
        lead, between, tail = one[: first.name], one[first.name_end : first.arguments], one[first.end :]
        tail = tail.removesuffix(end).rstrip("\n")
        second = _placed(two, 1, tags) if two.startswith(one[: first.end]) else None
        if second is None:
            return CallFormat("", lead, between, tail, "", None, as_text, tags=tags)
        middle = two[first.end : second.name]
        before = _shared(lead[::-1], middle[::-1])[::-1]
        after = _shared(tail, middle[: len(middle) - len(before)])
        separator = middle[len(after) : len(middle) - len(before)]
        begin = lead[: len(lead) - len(before)]
        return CallFormat(begin, before, between, after, tail[len(after) :], separator, as_text, tags=tags)
    return None if mentioned else HERMES


def _shared(one: str, other: str) -> str:
    """What both begin with."""
    return one[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))]


def _tags(one: str, two: str) -> Tags | None:
    """Tags of arguments, in a call with one and in the same with another one behind it."""
    pairs = [item for arguments in _ARGUMENTS for item in arguments.items()]
    text = re.escape(_NAMES[0]) + "(.*?)" + "(.*?)".join(re.escape(word) for pair in pairs for word in pair) + "(.*)"
    found = re.search(text, two, re.DOTALL)
    if found is None or pairs[0][1] not in one:
        return None
    first, between, middle, _, _ = found.groups()
    before = _shared(first[::-1], middle[::-1])[::-1]
    before = before[max(before.rfind("<"), 0) :]
    return Tags(before, between, middle[: len(middle) - len(before)]) if before and between else None


@dataclass(frozen=True)
class _Place:
    """Where a trial's name begins and ends, and its arguments do."""

    name: int
    name_end: int
    arguments: int
    end: int


def _placed(text: str, number: int, tags: Tags | None = None) -> _Place | None:
    name = text.find(_NAMES[number])
    name_end = name + len(_NAMES[number])
    if name < 0:
        return None
    if tags is not None:
        ((key, value),) = _ARGUMENTS[number].items()
        written = f"{tags.before}{key}{tags.between}{value}{tags.after}"
        at = text.find(written, name_end)
        return None if at < 0 else _Place(name, name_end, at, at + len(written))
    for found in re.finditer(r"\{", text[name_end:]):
        at = name_end + found.start()
        try:
            value, length = json.JSONDecoder().raw_decode(text[at:])
        except ValueError:
            continue
        if value == _ARGUMENTS[number]:
            return _Place(name, name_end, at, at + length)
    return None


@dataclass(frozen=True)
class Said:
    """What is new of an answer: text, and calls."""

    text: str
    calls: tuple[CallDelta, ...]


class CallReader:
    """Reads an answer that comes piece by piece: text, and calls of tools, each with the schema of its arguments.

    A call begins once its name and the beginning of its arguments are there, and what follows is sent as it comes.
    """

    def __init__(self, form: CallFormat, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._form = form
        self._tools = tools
        self._count = 0
        # What is not read yet, and what came of it.
        self._held = self._said = ""
        self._ended = False
        self._deltas: list[CallDelta] = []
        self._parser = self._parse()

    def push(self, text: str, ended: bool = False) -> Said:
        """Take text, the last if it has `ended`; return what is now known."""
        self._held, self._ended = self._held + text, ended
        self._said, self._deltas = "", []
        next(self._parser)
        return Said(self._said, tuple(self._deltas))

    # Each of these yields where it needs more text.

    def _parse(self) -> Iterator[None]:
        marker = self._form.marker
        if not marker:
            yield from self._calls()
        while True:
            # Without a marker only what an answer begins with may be a call.
            stops = StopStrings([marker] if marker else [])
            while not stops.found:
                self._said += stops.push(self._take(len(self._held)))
                if stops.found:
                    break
                if self._ended:
                    self._said += stops.finish()
                yield
            self._held = stops.rest
            yield from self._calls()

    def _calls(self) -> Iterator[None]:
        """Read calls, up to what is none."""
        form, passed = self._form, ""
        while True:
            held = self._held.lstrip(_BETWEEN)
            blank = len(self._held) - len(held)
            around = next((each for each in form.fragments if held.startswith(each)), "")
            # Each object of a list is read by itself.
            if not around and form.is_object and (held[:1] == "[" or (held[:1] == "]" and not passed.strip())):
                around = held[0]
            if around:
                passed += self._take(blank + len(around))
                continue
            begun = not held or any(each.startswith(held) for each in form.fragments)
            known = None if begun else self._object(held) if form.is_object else self._named(held)
            if known is not None and known.name in self._tools:
                self._take(blank + known.length)
                yield from self._arguments(known)
                passed = ""
            elif known is not None or self._ended:
                if known is not None or held:
                    # It began as a call, and is text.
                    self._said += passed + self._take(blank + 1 if known is not None else len(self._held))
                    return
                self._held = passed = ""
                yield
            else:
                yield

    def _object(self, held: str) -> _Head | None:
        """The beginning of a call that is an object; None: there is not enough yet."""
        found = _HEAD.match(held)
        if found is not None:
            return _Head(json.loads(f'"{found[1]}"', strict=False), found.end())
        if held[0] != "{":
            return _NO_CALL
        try:
            value, end = json.JSONDecoder().raw_decode(held)
        except json.JSONDecodeError as error:
            # What is wrong before its end never becomes right.
            unfinished = error.pos >= len(held) - 6 or error.msg.startswith("Unterminated")
            return None if unfinished else _NO_CALL
        return _whole(value, end)

    def _named(self, held: str) -> _Head | None:
        """The beginning of a call whose name stands alone."""
        between = self._form.between.strip()
        opens = "" if self._form.tags else "{"
        ends = "" if opens or between else r"(?=[\s<])"
        found = re.match(rf"\s*([^\s{{<\[]+?)\s*{re.escape(between)}{ends}\s*{opens}", held)
        if found is not None:
            return _Head(found[1], found.end() - len(opens))
        name = held.split(between or "{", maxsplit=1)[0].strip()
        begun = any(each.startswith(name) or name.startswith(each) for each in self._tools)
        return None if begun and len(held) < len(name) + len(between) + 64 else _NO_CALL

    def _arguments(self, head: _Head) -> Iterator[None]:
        """Read a call's arguments, and what closes its object."""
        call = ToolCall(head.name)
        self._count += 1
        if head.arguments is not None:
            self._grow(call, head.arguments, begins=True)
        elif self._form.tags is not None:
            self._grow(call, "{", begins=True)
            yield from self._tagged(call, self._form.tags)
        else:
            self._grow(call, "", begins=True)
            yield from self._balanced(0, call)
            if self._form.is_object:
                yield from self._balanced(1)
        self._grow(call, "", ends=True)

    def _balanced(self, depth: int, call: ToolCall | None = None) -> Iterator[None]:
        """Read JSON until its brackets are closed, of which `depth` are open already."""
        quoted = escaped = False
        while True:
            for at, letter in enumerate(self._held):
                if quoted:
                    quoted, escaped = escaped or letter != '"', not escaped and letter == "\\"
                elif letter == '"':
                    quoted = True
                else:
                    depth += (letter in "[{") - (letter in "]}")
                    if depth == 0:
                        self._grow(call, self._take(at + 1))
                        return
            self._grow(call, self._take(len(self._held)))
            yield

    def _tagged(self, call: ToolCall, tags: Tags) -> Iterator[None]:
        """Read arguments between tags, each sent as JSON once it is whole."""
        before, after, count = tags.before.strip(), tags.after.strip(), 0
        types = self._tools[call.name].get("properties", {})
        while True:
            held = self._held.lstrip()
            key, whole, rest = held.removeprefix(before).partition(tags.between.strip())
            if held.startswith(before) and whole and after in rest:
                text, _, self._held = rest.partition(after)
                schema = types.get(key.strip(), {})
                value = _typed(text.removeprefix("\n").removesuffix("\n"), schema)
                written = f"{json.dumps(key.strip())}: {json.dumps(value, ensure_ascii=False)}"
                self._grow(call, (", " if count else "") + written)
                count += 1
            elif held.startswith(before) or before.startswith(held):
                yield
            else:
                self._grow(call, "}")
                return

    def _grow(self, call: ToolCall | None, arguments: str, begins: bool = False, ends: bool = False) -> None:
        """Send what is new of a call, in one piece with what else is new of it."""
        if call is None:
            return
        call.arguments += arguments
        last = self._deltas[-1] if self._deltas else None
        if last is not None and last.call is call:
            self._deltas[-1] = replace(last, arguments=last.arguments + arguments, ends=ends)
        elif arguments or begins or ends:
            self._deltas.append(CallDelta(call, self._count - 1, arguments, begins, ends))

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


@dataclass(frozen=True)
class _Head:
    """A call's name, how many letters are before its arguments, or the whole of them in other words."""

    name: str
    length: int
    arguments: str | None = None


_NO_CALL = _Head("", 0)
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters|args)"\s*:\s*(?=\{)')


def _whole(value: dict[str, Any], length: int) -> _Head:
    """A call that is an object in other words than most."""
    inner = value.get("function")
    value = inner if isinstance(inner, dict) else value
    arguments = next((value[name] for name in ("arguments", "parameters", "args") if name in value), None)
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    known = isinstance(value.get("name"), str) and isinstance(arguments, str)
    return _Head(value["name"], length, arguments) if known else _NO_CALL


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """A value that was written as text: JSON, but for what is a string. Blanks may stand around those of an enum."""
    if text.strip() in (*schema.get("enum", ()), schema.get("const")):
        return text.strip()
    try:
        return text if schema.get("type") == "string" else json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class CallableTools:
    """Tools that an answer may call.

    Attributes:
        form: how calls are written.
        schemas: of the arguments of each.
        shown: special tokens that calls are written with.
    """

    form: CallFormat
    schemas: Mapping[str, Mapping[str, Any]]
    shown: frozenset[int]

    def reader(self) -> CallReader:
        """Make what reads one answer."""
        return CallReader(self.form, self.schemas)


@dataclass(frozen=True)
class CallGrammar:
    """What an answer fits that calls tools, or may.

    Attributes:
        form: how calls are written.
        tools: name and JSON schema of the arguments of each that may be called.
        needed: whether one must be; else text may stand before calls, or alone.
        many: whether several may be.
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

    def structural_tag(self, style: str = "json") -> dict[str, Any]:
        """In xgrammar's terms; `style` is its name of how arguments are written."""
        form = self.form
        alone = not self.needed and self.otherwise is None

        def tag(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
            begin, end = f"{form.before}{name}{form.between}", form.after
            # Where text may come first, a call stands alone.
            begin, end = (form.begin + begin, end + form.end) if alone else (begin, end)
            content = _json(schema) | {"style": style}
            return {"type": "tag", "begin": begin, "content": content, "end": end}

        tags = [tag(name, schema) for name, schema in self.tools.items()]
        if alone:
            trigger = form.begin + form.before
            kind = {"type": "triggered_tags", "stop_after_first": not self.many}
            return _tagged({**kind, "triggers": [trigger], "tags": tags})
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
