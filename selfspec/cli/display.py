"""Show rounds as they are committed: as plain text, or coloured by where each token came from."""

from __future__ import annotations

from typing import IO

from rich.console import Console
from rich.style import Style
from rich.text import Text

from selfspec.decode.output import RowRound
from selfspec.decode.text_stream import TextStream

# Strokes and weight besides colours, so that NO_COLOR leaves the three apart.
_ACCEPTED = Style(color="green")
_OWN = Style(bold=True)
_REJECTED = Style(color="red", dim=True, strike=True)


class PlainDisplay:
    """Writes the text as it is committed, and a line break at the end."""

    def __init__(self, stream: TextStream, out: IO[str]) -> None:
        self._stream = stream
        self._out = out

    def show(self, committed: RowRound) -> None:
        """Write a round's text."""
        self._write(self._stream.push(committed.tokens))

    def finish(self) -> None:
        """Write the rest and a line break."""
        self._write(self._stream.finish() + "\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class DraftDisplay:
    """Writes accepted draft tokens, the target's own tokens and rejected draft tokens, each in its own style."""

    def __init__(self, stream: TextStream, out: IO[str]) -> None:
        self._stream = stream
        self._console = Console(file=out, highlight=False, markup=False, soft_wrap=True)
        legend = (
            ("accepted draft", _ACCEPTED),
            " | ",
            ("the target's own", _OWN),
            " | ",
            ("rejected draft", _REJECTED),
            " (+n: tokens of other branches)",
        )
        self._console.print(Text.assemble(*legend), end="\n\n")

    def show(self, committed: RowRound) -> None:
        """Write a round: what was accepted, what was rejected, and then the target's own token."""
        self._write(self._stream.push(committed.tokens[: committed.accepted]), _ACCEPTED)
        rejected = self._stream.foresee(committed.rejected)
        others = len(committed.draft) - committed.accepted - len(committed.rejected)
        rejected += f"(+{others})" if others else ""
        # A line that was not committed must not break the text.
        self._write(rejected.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"), _REJECTED)
        self._write(self._stream.push(committed.tokens[committed.accepted :]), _OWN)

    def finish(self) -> None:
        """Write the rest and a line break."""
        self._write(self._stream.finish() + "\n", _OWN)

    def _write(self, text: str, style: Style) -> None:
        self._console.print(Text(text, style), end="")
        self._console.file.flush()
