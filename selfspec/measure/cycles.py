"""Repeating cycles in generated text: small models fall into them when decoding greedily, which flatters any draft."""

from __future__ import annotations

from collections.abc import Sequence

# Shorter repeats are ordinary text: indentation, brackets, digits.
_SHORTEST_RUN = 8


def cycle_share(tokens: Sequence[int], longest: int = 64) -> float:
    """Share of tokens inside a repeating cycle: a passage that stands three times or more in direct succession.

    Cycles of up to `longest` tokens are looked for. 0 for no tokens.
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
    return sum(inside) / len(inside) if inside else 0.0
