"""Shape of a draft: a tree of nodes over the last committed token. A chain is a tree with one branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class Tree:
    """Lists the nodes of a draft in topological order: parents come first, siblings in the order of judging.

    Attributes:
        parents: parent of each node; -1: the last committed token, which is no node itself.

    Raises:
        ValueError: a node comes before its parent.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(f"node {node} of a tree must come after its parent, got parent {parent}")

    @staticmethod
    @lru_cache(maxsize=256)
    def chain(length: int) -> Tree:
        """Return the tree with one branch of `length` nodes."""
        return Tree(tuple(range(-1, length - 1)))

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self.parents)

    @cached_property
    def trunk(self) -> int:
        """Number of first nodes that form a chain."""
        return next((node for node, parent in enumerate(self.parents) if parent != node - 1), len(self.parents))

    @property
    def is_chain(self) -> bool:
        """True if every node is the child of the one before it."""
        return self.trunk == len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node: 1 for a child of the last committed token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Depth of the deepest node; 0 for a tree of no nodes."""
        return max(self.depths, default=0)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Nodes on the path to each node, that node included."""
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            paths.append((*(paths[parent] if parent >= 0 else ()), node))
        return tuple(paths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of the last committed token, then of each node: `children[node + 1]`, in order."""
        children: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for node, parent in enumerate(self.parents):
            children[parent + 1].append(node)
        return tuple(map(tuple, children))

    def first_branch(self, path: Sequence[int]) -> list[int]:
        """Return the nodes that follow a path (possibly empty): a first child, its first child, and so on."""
        branch, place = [], path[-1] if path else -1
        while self.children[place + 1]:
            place = self.children[place + 1][0]
            branch.append(place)
        return branch

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Number of earlier siblings of each node."""
        return tuple(self.children[parent + 1].index(node) for node, parent in enumerate(self.parents))
