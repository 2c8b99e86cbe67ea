"""Texts of others inside Markdown: names that say what they say and nothing about the page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SPECIAL = re.compile(r"[\\`*\[\]<>|~&#$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# What makes a list of a line that begins with it.
_BEGINNING = re.compile(r"^(\d*)([-+.)])(?= )")


def escaped(text: str) -> str:
    """A text as Markdown that shows it, in one line: no markup, no HTML, no end of a table's cell."""
    line = "".join(letter if letter.isprintable() else "\ufffd" for letter in " ".join(text.split()))
    return _BEGINNING.sub(r"\1\\\2", _SPECIAL.sub(r"\\\g<0>", line))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts, whatever they hold."""
    lines = [_line(map(escaped, head)), _line(["---"] * len(head))]
    return "\n".join(lines + [_line(map(escaped, row)) for row in rows])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
