"""Code and output as they stand in the project's Markdown, to be run and compared."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def snippets(page: str, language: str) -> list[str]:
    """The fenced blocks of a page that say they are in a language, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [body for named, body in _FENCED.findall(text) if named == language]
