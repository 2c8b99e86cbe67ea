"""What `selfspec demo` shows: texts as they are written, and at the end the headline, the table and what to do next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console

from selfspec.decode.output import Round
from selfspec.decode.text_stream import TextStream
from selfspec.measure.estimate import Estimate
from selfspec.tools.bench.race import Score

_INDENT = "    "


@dataclass(frozen=True)
class Standing:
    """An arm's name, and its scores greedily and sampled."""

    name: str
    greedy: Score
    sampled: Score


class DemoScreen:
    """Standard output, 80 columns wide, legible without colours; quiet where it is to hold JSON alone."""

    def __init__(self, quiet: bool) -> None:
        self._console = Console(quiet=quiet, highlight=False, markup=False, soft_wrap=True)

    def say(self, *lines: str, style: str = "") -> None:
        """Print lines, and have them seen now."""
        self._console.print(*lines, sep="\n", style=style)
        self._console.file.flush()

    def show_text(self, title: str, prompt: str, stream: TextStream, rounds: Iterable[Round], bar: str) -> int:
        """Print a text while it is decoded, with a bar after each target pass.

        Args:
            title: line above the text.
            prompt: of which the last two lines are shown.
            stream: of the text.
            rounds: of the first row.
            bar: what ends a pass.

        Returns:
            The number of passes.
        """
        self.say(title, style="bold")
        self._write("\n".join(["", *prompt.splitlines()[-2:]])[1:], first=True)
        tokens = passes = 0
        for committed in rounds:
            tokens, passes = tokens + len(committed.rows[0].tokens), passes + 1
            self._write(stream.push(committed.rows[0].tokens) + bar)
        self._write(stream.finish() + "\n")
        self.say(f"({tokens} tokens in {passes} passes)", "", style="dim")
        return passes

    def show_scores(self, standings: Sequence[Standing], headed: Standing, temperature: float) -> None:
        """Print the table: a line each, the one of the headline in bold."""
        self.say(_row("times as fast", "greedy", f"temperature {temperature:g}", "tokens per pass"))
        for each in standings:
            passes = f"{each.greedy.tokens_per_pass:.1f}, {each.sampled.tokens_per_pass:.1f}"
            compared = each is not standings[0]
            row = _row(each.name, _speed(each.greedy, compared), _speed(each.sampled, compared), passes)
            self.say(row, style="bold" if each is headed else "")

    def _write(self, text: str, first: bool = False) -> None:
        self._console.out((_INDENT if first else "") + text.replace("\n", "\n" + _INDENT), end="")
        self._console.file.flush()


def headline(headed: Standing, identical: bool) -> str:
    """What a draft is worth, in a line."""
    speed = headed.greedy.speedup.value
    said = f"{speed:.1f}x faster than" if speed >= 1.05 else f"{speed:.2f}x the speed of"
    text = "identical text" if identical else "THE TEXT DIFFERS"
    return f"{said} model.generate, {headed.greedy.tokens_per_pass:.1f} tokens per pass, {text}"


def _row(name: str, greedy: str, sampled: str, passes: str) -> str:
    return f"{name[:16]:<17}{greedy:<20}{sampled:<20}{passes}"


def shown_speed(speed: Estimate, digits: int, unit: str = "") -> str:
    """A speed with its interval, if it has one: `1.23 (1.10-1.31)`."""
    interval = f" ({speed.low:.{digits}f}-{speed.high:.{digits}f}{unit})" if speed.low < speed.high else ""
    return f"{speed.value:.{digits}f}{unit}{interval}"


def _speed(score: Score, compared: bool) -> str:
    return shown_speed(score.speedup, 2) if compared else f"1.00  {score.tokens_per_second:.0f} tokens/s"
