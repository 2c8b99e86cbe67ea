"""Choosing the tree that promises most for its cost, of candidates that cost no draft step."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from selfspec.cache.tree import Tree
from selfspec.draft.draft import Budget

_SIZES = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)


@dataclass(frozen=True)
class Shape:
    """Holds a tree of candidates, siblings likeliest first, and the draft tokens that it commits in expectation."""

    tree: Tree
    expected: float


def best_shape(chances: Sequence[float], cost: Callable[[int], float], most: Budget) -> Shape:
    """Return the tree within `most` that commits most for the cost of its pass, in plain steps by number of nodes.

    `chances` are the acceptance rates of candidates by rank where their place is reached, the likeliest first.
    """
    shapes = [largest_products(tuple(chances), size, most.depth) for size in sizes_within(most.nodes)]
    return max(shapes, key=lambda shape: (1 + shape.expected) / cost(len(shape.tree)))


def sizes_within(nodes: int) -> list[int]:
    """Return the sizes of trees to try: few, so that few kinds of passes need a program."""
    return [size for size in _SIZES if size <= nodes]


@lru_cache(maxsize=256)
def largest_products(chances: tuple[float, ...], nodes: int, depth: int) -> Shape:
    """Return the tree of `nodes` nodes that commits most if a rank has the same acceptance rate at every place.

    It holds the nodes with the largest products of rates along their paths (Sequoia, Chen et al., 2024, arXiv
    2402.12374). It has fewer nodes where `depth` has no room for more.
    """
    parents: list[int] = []
    expected = 0.0
    # The next node of each family: the chance of its path, in the order in which families began; then its family.
    families = [(-chances[0], -1, 0, 1, 1.0)] if depth else []
    while families and len(parents) < nodes:
        loss, parent, rank, level, reached = heapq.heappop(families)
        expected -= loss
        parents.append(parent)
        if rank + 1 < len(chances):
            heapq.heappush(families, (-reached * chances[rank + 1], parent, rank + 1, level, reached))
        if level < depth:
            heapq.heappush(families, (loss * chances[0], len(parents) - 1, 0, level + 1, -loss))
    return Shape(Tree(tuple(parents)), expected)
