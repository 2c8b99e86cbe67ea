"""Which drafts are verified when none are named, and a draft on a model, ready to generate."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.api import SelfSpeculative
from selfspec.draft import Drafter, EarlyExit, LayerSkip
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.model.layer_path import LayerPath


@dataclass(frozen=True)
class DraftUnderTest:
    """A draft on a model.

    Attributes:
        name: of the draft.
        drafter: what drafts; None for plain decoding.
        spec: generates with it.
    """

    name: str
    drafter: Drafter | None
    spec: SelfSpeculative


def default_drafts(depth: int) -> tuple[Drafter, ...]:
    """A spread over the kinds of draft path, for a network of `depth` layers.

    Early exits at half of the depth and at the last layer but one, one whole layer left out, the attention of one
    layer, the MLP of one layer. In a shallow network some of these are the same path, or none; each is named once.
    """
    spread: list[LayerPathDrafter] = [EarlyExit(layer) for layer in (depth // 2, depth - 1) if layer >= 1]
    if depth > 1:
        spread.append(LayerSkip(layers=[depth // 2]))
    spread += [LayerSkip(attention=[depth // 3]), LayerSkip(mlp=[2 * depth // 3])]
    chosen: dict[LayerPath, Drafter] = {}
    for drafter in spread:
        chosen.setdefault(drafter.path(depth), drafter)
    return tuple(chosen.values())
