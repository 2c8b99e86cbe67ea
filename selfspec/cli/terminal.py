"""What the terminal can show."""

from __future__ import annotations

from typing import IO

from rich.console import Console

from selfspec.errors import UnsupportedOptionError


def require_colours(stream: IO[str]) -> None:
    """Refuse a display that says nothing without colours and strokes.

    Raises:
        UnsupportedOptionError: `stream` is no terminal.
    """
    if not Console(file=stream).is_terminal:
        raise UnsupportedOptionError(
            "--show-drafts marks tokens by colour, and standard output is no terminal; set FORCE_COLOR=1 to colour it "
            "nevertheless, or use --output json, which then lists every round"
        )
