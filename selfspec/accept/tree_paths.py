"""Find the accepted nodes of a tree and their paths on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from selfspec.cache.tree import Tree
from selfspec.device import to_device


def first_path(mask: Tensor, tree: Tree) -> Tensor:
    """Return the place where the path of first accepted children ends, `[rows]`; 0: no child is accepted."""
    if tree.is_chain:
        return mask.long().cumprod(-1).sum(-1)
    tables = tree_tables(tree, mask.device)
    taken = mask & ~(mask[:, None] & tables.earlier_siblings).any(-1)
    # A node comes after its ancestors, so the last node of a path is the deepest.
    return (_reached(taken, tables) * tables.places[1:]).amax(-1)


def longest_path(mask: Tensor, tree: Tree) -> Tensor:
    """Return the place of the deepest node whose whole path is accepted, the first of several, `[rows]`; 0: none."""
    if tree.is_chain:
        return mask.long().cumprod(-1).sum(-1)
    tables = tree_tables(tree, mask.device)
    # Deeper is better; among nodes of one depth the first.
    order = tables.depths[1:] * len(tree) - tables.places[1:]
    best = torch.where(_reached(mask, tables), order, -1).max(-1)
    return torch.where(best.values < 0, 0, best.indices + 1)


def from_leaves(mask: Tensor, tree: Tree) -> Tensor:
    """Return the place of the first accepted node if each node is judged after its children, `[rows]`; 0: none."""
    tables = tree_tables(tree, mask.device)
    return tables.by_turn[(mask * tables.turns).amax(-1)] if len(tree) else mask.sum(-1)


def at_parents(values: Tensor, tree: Tree) -> Tensor:
    """Return the values at each node's parent, `[rows, nodes, ...]`, from those of all places."""
    return values[:, :-1] if tree.is_chain else values[:, tree_tables(tree, values.device).parents]


@dataclass(frozen=True)
class Rank:
    """Holds the nodes that have the same number of earlier siblings, and the `siblings` just before them, if any.

    `before` is the place of a first sibling's parent; for others, the index of the previous sibling in the rank before.
    """

    nodes: Tensor
    before: Tensor
    siblings: Tensor | None


@dataclass(frozen=True)
class TreeTables:
    """Holds a tree as tensors. Place 0 is the last committed token, place i + 1 is node i."""

    places: Tensor
    depths: Tensor
    parents: Tensor  # place of each node's parent, `[nodes]`
    children: Tensor  # children of each place in order, -1 after the last, `[places, most children]`
    last_children: Tensor  # last child of each place, -1 at leaves
    inner: Tensor  # places with children, without place 0
    turns: Tensor  # `[nodes]`, falling in the order that judges children before their parent; 1 for the last
    by_turn: Tensor  # place with each turn; 0 for turn 0
    paths: Tensor  # places from the root to each place, which is repeated to fill up, `[places, depth + 1]`
    ancestors: Tensor  # True if a node (first axis) has another (second axis) on its path; each has itself
    earlier_siblings: Tensor  # True if a node (first axis) comes after a sibling (second axis)
    ranks: tuple[Rank, ...]


@lru_cache(maxsize=64)
def tree_tables(tree: Tree, device: torch.device) -> TreeTables:
    """Return the tables of a tree, which are made once for each device."""
    nodes = range(len(tree))
    widest = max(map(len, tree.children))
    paths = [(0,), *(tuple(node + 1 for node in (-1, *path)) for path in tree.paths)]
    last = [children[-1] if children else -1 for children in tree.children]
    order = [*_from_leaves(tree, -1)][-2::-1]
    siblings = [[node for node in tree.children[parent + 1] if node < each] for each, parent in enumerate(tree.parents)]
    return TreeTables(
        places=torch.arange(len(tree) + 1, device=device),
        depths=to_device((0, *tree.depths), device),
        parents=to_device([parent + 1 for parent in tree.parents], device),
        children=to_device([[*nodes, *[-1] * (widest - len(nodes))] for nodes in tree.children], device),
        last_children=to_device(last, device),
        inner=to_device([place for place, child in enumerate(last) if place and child >= 0], device),
        turns=to_device([order.index(node) + 1 for node in nodes], device),
        by_turn=to_device([0, *(node + 1 for node in order)], device),
        paths=to_device([[*path, *[path[-1]] * (tree.depth + 1 - len(path))] for path in paths], device),
        ancestors=to_device([[node in path for node in nodes] for path in tree.paths], device),
        earlier_siblings=to_device([[node in before for node in nodes] for before in siblings], device),
        ranks=tuple(_ranks(tree, device)),
    )


def _from_leaves(tree: Tree, node: int) -> Iterator[int]:
    """Yield the nodes below a node, then the node, each after its children."""
    for child in tree.children[node + 1]:
        yield from _from_leaves(tree, child)
    yield node


def _ranks(tree: Tree, device: torch.device) -> Iterator[Rank]:
    earlier: list[int] = []
    for rank in range(max(map(len, tree.children))):
        families = [children for children in tree.children if len(children) > rank]
        nodes = [children[rank] for children in families]
        siblings = [children[rank - 1] for children in families] if rank else None
        before = [earlier.index(node) for node in siblings] if siblings else [tree.parents[node] + 1 for node in nodes]
        earlier = nodes
        yield Rank(
            to_device(nodes, device),
            to_device(before, device),
            None if siblings is None else to_device(siblings, device),
        )


def _reached(mask: Tensor, tables: TreeTables) -> Tensor:
    """Return True where the mask holds for a node and all its ancestors, `[rows, nodes]`."""
    return ~(~mask[:, None] & tables.ancestors).any(-1)
