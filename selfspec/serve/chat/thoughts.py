"""Parts what an answer thinks from what it says, by the marks that its template writes around thoughts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import regex
from transformers.utils.chat_parsing import ResponseParser


class Marks(NamedTuple):
    """Names the marks before and behind thoughts; `lead`: marks before the answer, with or without thoughts.

    A template that holds `sign` is of such a model; "": the mark behind thoughts is.
    """

    begin: str
    end: str
    lead: tuple[str, ...] = ()
    sign: str = ""


_FINAL = "<|channel|>final<|message|>"

MARKS = (
    Marks("<think>", "</think>"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<seed:think>", "</seed:think>"),
    # Gemma 4.
    Marks("<|channel>thought", "<channel|>"),
    # gpt-oss.
    Marks(
        *("<|channel|>analysis<|message|>", "<|end|>", (f"<|start|>assistant{_FINAL}", _FINAL)),
        sign="<|channel|>analysis<|message|>",
    ),
)


class Parted(NamedTuple):
    """What is new of an answer: thought, and said."""

    thought: str
    said: str


@dataclass(frozen=True)
class Thoughts:
    """Marks around the thoughts of an answer, special tokens among them, and whether the prompt has begun them."""

    marks: Marks
    shown: frozenset[int] = frozenset()
    begun: bool = False


class ThoughtReader:
    """Parts an answer that comes piece by piece. White space around marks is neither thought nor said."""

    def __init__(self, thoughts: Thoughts) -> None:
        marks = thoughts.marks
        begin, end, *leads = map(regex.escape, (marks.begin, marks.end, *marks.lead))
        fields = {
            "thought": {"open_pattern": rf"\A\s*{begin}\s*", "close_pattern": rf"\s*{end}\s*"},
            # Nothing is in it.
            "lead": {
                "open_pattern": rf"(?:\A\s*|(?<={end}\s*))(?:{'|'.join(leads) or '(?!)'})\s*",
                "close_pattern": r"(?=.|\Z)",
            },
            "said": {},
        }
        template = {"start_anchor": "\0", "fields": fields}
        self._parser = ResponseParser(template, prefix=marks.begin if thoughts.begun else "")

    def push(self, text: str, ended: bool = False) -> Parted:
        """Take text, the last if it has `ended`."""
        events = [*self._parser.feed(text), *(self._parser.finalize()[1] if ended else ())]
        new = {"thought": "", "said": ""}
        for each in events:
            if each["type"] == "region_chunk":
                new[each["field"]] += each["text"]
        return Parted(**new)
