"""Parts what an answer thinks from what it says, by the marks that its template writes around thoughts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import regex


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
        self._begin, self._end, self._lead = (
            regex.compile(rf"\s*+(?:{'|'.join(map(regex.escape, each)) or '(?!)'})")
            for each in ((marks.begin,), (marks.end,), marks.lead)
        )
        self._leads = True
        # None: it has said nothing yet.
        self._thinks = True if thoughts.begun else None
        self._held = ""
        # White space is left out until something else comes.
        self._blank = thoughts.begun

    def push(self, text: str, ended: bool = False) -> Parted:
        """Take text, the last if it has `ended`."""
        self._held += text
        thought = ""
        if self._thinks is None:
            found = self._begin.match(self._held, partial=not ended)
            if found is not None and found.partial:
                return Parted("", "")
            self._thinks = self._blank = found is not None
            self._held = self._held[0 if found is None else found.end() :]
        if self._thinks:
            found = self._end.search(self._held, partial=not ended)
            cut = len(self._held) if found is None else found.start()
            thought, self._held = self._shown(self._held[:cut]), self._held[cut:]
            if found is None or found.partial:
                return Parted(thought, "")
            self._thinks, self._blank, self._held = False, True, self._held[found.end() - cut :]
        if self._leads:
            found = self._lead.match(self._held, partial=not ended)
            if found is not None and found.partial:
                return Parted(thought, "")
            self._leads, self._held = False, self._held[0 if found is None else found.end() :]
        said, self._held = self._held, ""
        return Parted(thought, self._shown(said))

    def _shown(self, text: str) -> str:
        text = text.lstrip() if self._blank else text
        self._blank = self._blank and not text
        return text
