"""Chances of siblings by rank."""

from __future__ import annotations

from selfspec.cache.tree import Tree
from selfspec.draft.tree_growth import RankChances


def test_ranks_are_counted_along_the_path() -> None:
    chances, tree = RankChances((0.45, 0.12), 30.0), Tree((-1, -1, 0, 1))
    assert chances.rates() == (0.44, 0.12)
    for _ in range(400):
        chances.count(tree, (1, 3))
    # The second child of the root, and then the first one of it.
    assert chances.rates() == (0.5, 0.5)
