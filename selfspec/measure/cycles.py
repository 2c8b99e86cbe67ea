"""Repeating cycles in generated text: small models fall into them when decoding greedily, which flatters any draft."""

from __future__ import annotations

from collections.abc import Sequence

# Shorter repeats are ordinary text: indentation, brackets, digits.
_SHORTEST_RUN = 8


def in_cycles(tokens: Sequence[int], longest: int = 64) -> list[bool]:
    """Whether each token is inside a repeating cycle: a passage that comes three times or more in direct succession.

    Cycles of up to `longest` tokens are looked for.
    """
    inside = [False] * len(tokens)
    for period in range(1, min(longest, len(tokens) // 3) + 1):
        begin = period
        for place in range(period, len(tokens) + 1):
            if place < len(tokens) and tokens[place] == tokens[place - period]:
                continue
            if place - begin >= max(2 * period, _SHORTEST_RUN):
                inside[begin - period : place] = [True] * (place - begin + period)
            begin = place + 1
    return inside


def cycle_share(tokens: Sequence[int]) -> float:
    """Share of tokens inside repeating cycles; 0 for no tokens."""
    inside = in_cycles(tokens)
    return sum(inside) / len(inside) if inside else 0.0
