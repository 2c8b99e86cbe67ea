"""How often siblings of each rank are accepted, learnt from what rounds accept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from selfspec.cache.tree import Tree


class RankChances:
    """How often the first, second, ... child of a place is accepted where the place is reached.

    Args:
        rates: what they are held to be at first, of each rank.
        weight: how many places that counts for.

    Attributes:
        counts: how often each rank was accepted, and how often its place was reached, `[2, ranks]`.
    """

    def __init__(self, rates: Sequence[float], weight: float) -> None:
        self.counts = np.array([[weight * rate for rate in rates], [weight] * len(rates)])

    def rates(self) -> tuple[float, ...]:
        """Return the chance of each rank.

        To one part in fifty, so that shapes of trees change rarely; and no rank's above that of the one before it.
        """
        accepted, reached = self.counts.tolist()
        rates = (round(50 * each / places) / 50 for each, places in zip(accepted, reached, strict=True))
        return tuple(accumulate(rates, min))

    def count(self, tree: Tree, path: Sequence[int]) -> None:
        """Count which siblings were accepted along a path of a tree."""
        for place, accepted in zip((-1, *path), (*path, None), strict=True):
            for rank, node in enumerate(tree.children[place + 1]):
                self.counts[:, rank] += node == accepted, 1
