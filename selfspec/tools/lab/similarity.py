"""Skip sets by dynamic programming on the similarity of hidden states, as in CLaSp and KnapSpec.

After each layer, and for each amount of cost saved so far, the states most like the full model's own are kept. That
the best way to a layer begins with best ways to the layers before it is an approximation (CLaSp, Chen et al., 2025,
arXiv 2505.24196); attention and MLP weigh what they cost rather than one each, as in KnapSpec.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, islice

import torch
from torch import Tensor

from selfspec.measure.teacher_forced.passes import NOTHING, WHOLE, Parts, TeacherForcedText
from selfspec.model.layer_path import Part, Sublayer
from selfspec.tools.lab.drafts import SkipSet, Space
from selfspec.tools.lab.prices import Prices

# Layers whole, halved either way, or left out; what runs most comes first among equals.
_WAYS: tuple[Parts, ...] = (WHOLE, frozenset({Part.MLP}), frozenset({Part.ATTENTION}), NOTHING)
# No sublayer counts as more units than this, so that the tables stay small.
_MOST_UNITS = 4


@dataclass(frozen=True)
class _Kept:
    """One way through the first layers: what it leaves out and so saves, and its states, `[texts, tokens, hidden]`."""

    skipped: SkipSet
    saved: int
    similarity: float
    states: Tensor


def sets_by_similarity(text: TeacherForcedText, space: Space, prices: Prices, width: int = 1) -> list[SkipSet]:
    """Return the sets that keep the last hidden states most like the full model's, for every amount of cost saved.

    The text, of a reach of 1, may be short; `width` ways are kept for each amount.

    Returns:
        Most similar first.
    """
    costs = {part: max(prices.of_part(part), 1e-6) for part in Part}
    units = {part: min(_MOST_UNITS, round(cost / min(costs.values()))) for part, cost in costs.items()}
    kept = [_Kept(frozenset(), 0, 1.0, text.exact(0))]
    for layer in range(len(text.states) - 1):
        entering = torch.cat([way.states for way in kept], -3)
        drafted = slice(text.first - 1, -1)
        target = text.exact(layer + 1)[..., drafted, :].float()
        found = []
        for parts in _WAYS:
            left_out = frozenset(Sublayer(layer, part) for part in WHOLE - parts)
            if left_out <= frozenset(space.choices):
                leaving = text.run(layer, parts, entering).chunk(len(kept), -3)
                weight = sum(units[each.part] for each in left_out)
                for way, states in zip(kept, leaving, strict=True):
                    if len(way.skipped | left_out) <= space.most:
                        alike = float(torch.cosine_similarity(states[..., drafted, :].float(), target, -1).mean())
                        found.append(_Kept(way.skipped | left_out, way.saved + weight, alike, states))
        found.sort(key=lambda way: (way.saved, -way.similarity))
        kept = [way for _, ways in groupby(found, lambda way: way.saved) for way in islice(ways, width)]
    kept.sort(key=lambda way: -way.similarity)
    return [way.skipped for way in kept if len(way.skipped) >= space.fewest]
