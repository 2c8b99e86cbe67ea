"""Skip sets by dynamic programming on the similarity of hidden states, as in CLaSp and KnapSpec.

After each layer, and for each amount of cost saved so far, the states most like the full model's own are kept. That
the best way to a layer begins with best ways to the layers before it is an approximation (CLaSp, Chen et al., 2025,
arXiv 2505.24196); attention and MLP weigh what they cost rather than one each, as in KnapSpec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.measure.teacher_forced.passes import NOTHING, WHOLE, Parts, TeacherForcedText
from selfspec.model.layer_path import Part, Sublayer
from selfspec.tools.studies.prices import Prices
from selfspec.tools.studies.skip_sets import SkipSet, Space

# Layers whole, halved either way, or left out; what runs most comes first among equals.
_WAYS: tuple[Parts, ...] = (WHOLE, frozenset({Part.MLP}), frozenset({Part.ATTENTION}), NOTHING)
# No sublayer counts as more units than this, so that the tables stay small.
_MOST_UNITS = 4


@dataclass(frozen=True)
class Kept:
    """One way through the first layers.

    Attributes:
        skipped: what it leaves out.
        similarity: mean cosine of its states and the full model's.
        states: `[texts, tokens, hidden]`.
    """

    skipped: SkipSet
    similarity: float
    states: Tensor


def sets_by_similarity(text: TeacherForcedText, space: Space, prices: Prices, width: int = 1) -> list[SkipSet]:
    """Return the sets that keep the last hidden states most like the full model's, for every amount of cost saved.

    Args:
        text: a short one will do; with a reach of 1.
        space: sets that may be chosen.
        prices: what attention and MLP weigh.
        width: ways kept for each amount of cost saved.

    Returns:
        Most similar first.
    """
    units = _units(prices)
    allowed = frozenset(space.choices)
    depth = len(text.states) - 1
    table: dict[int, list[Kept]] = {0: [Kept(frozenset(), 1.0, text.exact(0))]}
    for layer in range(depth):
        ways = [(saved, kept) for saved in sorted(table) for kept in table[saved]]
        entering = torch.cat([kept.states for _, kept in ways], -3)
        target = text.exact(layer + 1)
        new: dict[int, list[Kept]] = {}
        for parts in _WAYS:
            left_out = frozenset(Sublayer(layer, part) for part in WHOLE - parts)
            if not left_out <= allowed:
                continue
            leaving = text.run(layer, parts, entering)
            weight = sum(units[each.part] for each in left_out)
            for (saved, kept), states in zip(ways, leaving.chunk(len(ways), -3), strict=True):
                skipped = kept.skipped | left_out
                if len(skipped) <= space.most:
                    found = Kept(skipped, _similarity(states, target, text.first), states)
                    new.setdefault(saved + weight, []).append(found)
        table = {saved: _best(ways_there, width) for saved, ways_there in new.items()}
    last = sorted((kept for there in table.values() for kept in there), key=lambda kept: -kept.similarity)
    return [kept.skipped for kept in last if space.holds(kept.skipped)]


def influence(text: TeacherForcedText, space: Space) -> dict[Sublayer, float]:
    """Return by how much each sublayer changes the exact states: 1 - cosine of a layer's output with and without it.

    The block influence of pruning studies, for sublayers. Small: likely to be missed little.
    """
    changed = {}
    for each in space.choices:
        parts = WHOLE - {each.part}
        without = text.run(each.layer, parts, text.exact(each.layer))
        changed[each] = 1 - _similarity(without, text.exact(each.layer + 1), text.first)
    return changed


def nested(importance: dict[Sublayer, float], space: Space) -> list[SkipSet]:
    """Return greedy sets: the least important sublayer, the two least important ones, and so on."""
    ranked = sorted(importance, key=lambda each: importance[each])
    return [frozenset(ranked[:size]) for size in range(space.fewest, space.most + 1)]


def _best(ways: Sequence[Kept], width: int) -> list[Kept]:
    ranked = sorted(ways, key=lambda kept: -kept.similarity)
    return list({kept.skipped: kept for kept in reversed(ranked)}.values())[::-1][:width]


def _similarity(states: Tensor, target: Tensor, first: int) -> float:
    drafted = slice(first - 1, -1)
    return float(torch.cosine_similarity(states[..., drafted, :].float(), target[..., drafted, :].float(), -1).mean())


def _units(prices: Prices) -> dict[Part, int]:
    costs = {part: max(prices.of_part(part), 1e-6) for part in Part}
    least = min(costs.values())
    return {part: min(_MOST_UNITS, max(1, round(cost / least))) for part, cost in costs.items()}
