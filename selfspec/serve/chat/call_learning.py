"""Finds out in which of the known formats a chat template writes calls of tools, by trials."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from selfspec.serve.chat.call_formats import FORMATS, HERMES, RESPONSES, CallFormat, ResponseFormat
from selfspec.serve.chat.call_reader import CallReader

Render = Callable[[list[dict[str, Any]], Mapping[str, Any]], str]
"""Writes messages, with variables of the template. It may raise."""

NAMES = ("qx_first_tool", "qx_other_tool")
ARGUMENTS: tuple[dict[str, Any], ...] = ({"qx_key": "qx value"}, {"qx_more": "qx else"})
# Nothing of a call begins or ends with it.
_TEXT = "~"


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
    return next((form for form in (*FORMATS, *RESPONSES) if _reads(form, written)), None)


def _reads(form: CallFormat | ResponseFormat, written: Sequence[str]) -> bool:
    """Return whether a reader of the format finds the first trial in one of these."""
    reads = [CallReader(form, {NAMES[0]: {}}).push(text, ended=True).calls for text in written]
    return any(
        [(each.call.name, json.loads(each.call.arguments)) for each in calls if each.ends] == [(NAMES[0], ARGUMENTS[0])]
        for calls in reads
    )


def _answer(render: Render, message: dict[str, Any]) -> str:
    """Render what stands in place of an answer's text; empty where the template refuses the message."""
    question = {"role": "user", "content": "Hello"}
    try:
        whole, plain = (render([question, each], {}) for each in (message, {"role": "assistant", "content": _TEXT}))
    # Whatever a template does with messages of a shape that it does not expect.
    except Exception:
        return ""
    # A tag is not cut.
    cut = _alike(whole, plain)
    opened = whole.rfind("<", 0, cut)
    cut = cut if opened < 0 or ">" in whole[opened:cut] else opened
    behind = whole[len(whole) - _alike(whole[cut:][::-1], plain[cut:][::-1]) :]
    closed, opened = behind.find(">"), behind.find("<")
    return whole[cut:].removesuffix(behind[closed + 1 :] if closed >= 0 and (opened < 0 or closed < opened) else behind)


def _alike(one: str, other: str) -> int:
    """Count the letters that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
