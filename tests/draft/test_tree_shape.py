"""Trees of the largest products of chances, and the one that commits most for its cost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.cache.tree import Tree
from selfspec.draft import Budget
from selfspec.draft.tree_growth import best_shape, largest_products


def expected(tree: Tree, chances: tuple[float, ...]) -> float:
    """Draft tokens committed: each node counts if all ranks along its path are accepted."""
    total = 0.0
    for path in tree.paths:
        product = 1.0
        for node in path:
            product *= chances[tree.ranks[node]]
        total += product
    return total


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 5))
def test_no_tree_of_so_many_nodes_commits_more(weights: list[float], nodes: int, depth: int) -> None:
    chances = tuple(sorted((weight / (sum(weights) + 0.1) for weight in weights), reverse=True))
    found = largest_products(chances, nodes, depth)
    assert found.expected == pytest.approx(expected(found.tree, chances))
    best = 0.0
    for parents in itertools.product(*(range(-1, node) for node in range(nodes))):
        tree = Tree(parents)
        if tree.depth <= depth and max(map(len, tree.children)) <= len(chances):
            best = max(best, expected(tree, chances))
    # Where there is no room for so many nodes no tree is found here.
    assert found.expected >= best - 1e-12
    assert found.tree.depth <= depth
    assert len(found.tree) == nodes or best == 0


def test_the_tree_grows_as_far_as_its_cost_is_worth_it() -> None:
    def size(each: float) -> int:
        return len(best_shape((0.5, 0.2, 0.1), lambda nodes: 1.1 + each * nodes, Budget(8, 31)).tree)

    sizes = [size(each) for each in (1.0, 0.1, 0.02, 0.0)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 0
    assert sizes[-1] == 31


def test_one_rank_makes_a_chain() -> None:
    assert best_shape((0.6,), lambda _: 1.0, Budget(5, 15)).tree == Tree.chain(5)
