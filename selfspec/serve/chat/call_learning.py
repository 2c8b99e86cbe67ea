"""Finds out how a chat template writes calls of tools: which format it is, or else what it writes around trials."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

import regex

from selfspec.serve.chat.call_formats import FORMATS, HERMES, RESPONSES, CallFormat, ResponseFormat, Tags
from selfspec.serve.chat.call_reader import CallReader

Render = Callable[[list[dict[str, Any]], Mapping[str, Any]], str]
"""Writes messages, with variables of the template. It may raise."""

NAMES = ("qx_first_tool", "qx_other_tool")
ARGUMENTS: tuple[dict[str, Any], ...] = ({"qx_key": "qx value"}, {"qx_more": "qx else"})
# Nothing of a call begins or ends with it.
_TEXT = "~"
_THOUGHT = "qx_thought"


def calling(*arguments: dict[str, Any], as_text: bool = False) -> dict[str, Any]:
    """Make the message of an answer that calls, one call for each trial's arguments."""
    calls = [
        {"name": name, "arguments": json.dumps(each) if as_text else each}
        for name, each in zip(NAMES, arguments, strict=False)
    ]
    made = [{"type": "function", "id": "qxqxqxqxq", "function": call} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": made}


def find_format(render: Render, source: str) -> CallFormat | ResponseFormat | None:
    """Return how calls are written by `render`, of a template's `source`; None: in a way that is not known."""
    written = [_answer(render, calling(ARGUMENTS[0], as_text=as_text)) for as_text in (False, True)]
    # An object that is written as Python does is none of JSON.
    written = [text for text in written if NAMES[0] in text and str(ARGUMENTS[0]) not in text]
    if not written:
        signed = (form for form in FORMATS if any(sign in source for sign in form.signs))
        return next(signed, HERMES)
    exact = [(NAMES[0], json.dumps(ARGUMENTS[0]))]
    for form in FORMATS:
        before, read, _ = written[0].partition(form.text(exact))
        if read and _reads(form, written):
            # White space that stands before a call is written with it.
            return form if before.strip() else replace(form, begin=before + form.begin)
    found = next((form for form in (*FORMATS, *RESPONSES) if _reads(form, written)), None)
    if found is not None:
        return found
    learned = _learned(render)
    return learned if learned is not None and _reads(learned, written) else None


def _reads(form: CallFormat | ResponseFormat, written: Sequence[str]) -> bool:
    """Return whether a reader of the format finds the first trial in one of these."""
    reads = [CallReader(form, {NAMES[0]: {}}).push(text, ended=True).calls for text in written]
    return any(
        [(each.call.name, json.loads(each.call.arguments)) for each in calls if each.ends] == [(NAMES[0], ARGUMENTS[0])]
        for calls in reads
    )


def _answer(render: Render, message: dict[str, Any], thought: str = "", **variables: Any) -> str:
    """Render what stands in place of an answer's text and of thoughts; empty where the template refuses the message."""
    question, more = {"role": "user", "content": "Hello"}, {"reasoning_content": thought} if thought else {}
    try:
        whole = render([question, {**message, **more}], variables)
        plain = render([question, {"role": "assistant", "content": _TEXT, **more}], variables)
    # Whatever a template does with messages of a shape that it does not expect.
    except Exception:
        return ""
    shared = _shared(whole, plain)
    # A tag is not cut.
    opened = shared.rfind("<")
    cut = len(shared) if opened < 0 or ">" in shared[opened:] else opened
    behind = _shared(whole[cut:][::-1], plain[cut:][::-1])[::-1]
    found = whole[cut:].removesuffix(_whole_tags(behind))
    # Some write what was thought before calls alone.
    return regex.sub(rf".*{thought}\s*(?:<[^<>]*>)?", "", found, flags=regex.DOTALL) if thought else found


def _whole_tags(text: str) -> str:
    """Return a text's end, from where no tag is cut."""
    closed, opened = text.find(">"), text.find("<")
    return text[closed + 1 :] if closed >= 0 and (opened < 0 or closed < opened) else text


def _shared(one: str, other: str) -> str:
    """Return the longest common prefix of two texts."""
    return one[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))]


def _learned(render: Render) -> CallFormat | None:
    """Learn what stands around trials, with thoughts before them or none: where least does."""

    def answers(*arguments: dict[str, Any], as_text: bool, thought: str, thinks: bool) -> str:
        return _answer(render, calling(*arguments, as_text=as_text), thought, enable_thinking=thinks)

    for as_text in (False, True):
        ways = [(thought, thinks) for thought in ("", _THOUGHT) for thinks in (True, False)]
        found = [_around(partial(answers, as_text=as_text, thought=each, thinks=thinks)) for each, thinks in ways]
        if any(found):
            return min(filter(None, found), key=lambda form: len(form.begin + form.before))
    return None


def _around(calls: Callable[..., str]) -> CallFormat | None:
    """Read what stands around trials."""
    one, two, tags = calls(ARGUMENTS[0]), calls(*ARGUMENTS), None
    objects = [rf'\{{\s*"{key}"\s*:\s*"{value}"\s*\}}' for each in ARGUMENTS for key, value in each.items()]
    found = regex.fullmatch(f"(.*?){NAMES[0]}(.*?){objects[0]}(.*)", one, regex.DOTALL)
    if found is None:
        tags = _tags(one, calls(ARGUMENTS[0] | ARGUMENTS[1]))
        if tags is None:
            return None
        objects = [
            regex.escape(f"{tags.before}{key}{tags.between}{value}{tags.after}")
            for each in ARGUMENTS
            for key, value in each.items()
        ]
        found = regex.fullmatch(f"(.*?){NAMES[0]}(.*?){objects[0]}(.*)", one, regex.DOTALL)
    if found is None:
        return None
    lead, between, tail = found.groups()
    both = regex.search(f"{NAMES[0]}.*?{objects[0]}(.*?){NAMES[1]}", two, regex.DOTALL)
    if both is None:
        return CallFormat(lead.lstrip(), between, tail.rstrip(), separator=None, tags=tags)
    middle = both[1]
    before = _whole_tags(_shared(lead[::-1], middle[::-1])[::-1])
    after = _shared(tail, middle[: len(middle) - len(before)])
    separator = middle[len(after) : len(middle) - len(before)]
    begin, end = lead[: len(lead) - len(before)].lstrip(), tail[len(after) :].rstrip()
    return CallFormat(before, between, after, begin, end, separator, tags)


def _tags(one: str, two: str) -> Tags | None:
    """Find the tags of arguments, in a call with one and in the same with another one behind it."""
    words = [word for each in ARGUMENTS for pair in each.items() for word in pair]
    found = regex.search(NAMES[0] + "(.*?)" + "(.*?)".join(words) + "(.*)", two, regex.DOTALL)
    if found is None or words[1] not in one:
        return None
    first, between, middle, _, _ = found.groups()
    before = _shared(first[::-1], middle[::-1])[::-1]
    before = before[max(before.rfind("<"), 0) :]
    return Tags(before, between, middle[: len(middle) - len(before)]) if before and between else None
