"""Counts of a generation as a short table."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from selfspec.decode.stats import Stats


def print_stats(stats: Stats) -> None:
    """Print the table on stderr."""
    table = Table("count", "value", box=None, show_header=False, pad_edge=False)
    seconds = sum(stats.seconds.values())
    table.add_row("new tokens", f"{stats.new_tokens} in {seconds:.2f} s" + _rate(stats.new_tokens, seconds))
    table.add_row("rounds", str(stats.rounds))
    table.add_row("mean accepted length", _number(stats.mean_accepted_length))
    if stats.drafted:
        table.add_row(
            "acceptance rate", f"{_number(stats.acceptance_rate)} of {stats.judged} judged, {stats.drafted} drafted"
        )
        table.add_row("acceptance by position", by_position(stats.accepted_per_position, stats.judged_per_position))
    else:
        table.add_row("drafted", "nothing")
    table.add_row("seconds", ", ".join(f"{phase} {spent:.3f}" for phase, spent in stats.seconds.items()))
    table.add_row("KV cache", f"{stats.cache_bytes:,} bytes")
    Console(stderr=True, highlight=False, markup=False).print(table)


def by_position(accepted: list[int], judged: list[int]) -> str:
    """The share of judged draft tokens that were accepted, at each position of the draft."""
    shares = (_number(a / j) if j else "-" for a, j in zip(accepted, judged, strict=True))
    return " ".join(shares) or "-"


def _rate(tokens: int, seconds: float) -> str:
    return f", {tokens / seconds:.1f} tokens/s" if seconds else ""


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
