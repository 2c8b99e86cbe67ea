"""Trees of what is likely in each row: the likeliest nodes, in one shape for all rows, by what was accepted before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.cache.tree import Tree
from selfspec.draft import Budget
from selfspec.draft.suffixes import Merged, Offer, TokenPath, Trust, counted, merged


def _most(nodes: int, committed: float) -> float:
    return committed


def _paths(parents: tuple[int, ...], tokens: list[int | None]) -> list[tuple[int | None, ...]]:
    return [tuple(tokens[node] for node in path) for path in Tree(parents).paths]


def test_shares_count_what_was_never_seen() -> None:
    shares = counted([(2.0, [1, 2]), (1.0, [1, 3]), (1.0, [4])])
    assert shares == {(1,): 3 / 6, (1, 2): 2 / 5, (1, 3): 1 / 5, (4,): 1 / 6}


def test_the_likeliest_nodes_are_taken_and_siblings_are_in_their_order() -> None:
    reach = {(1,): 0.5, (1, 2): 0.4, (3,): 0.3, (1, 4): 0.05, (3, 5): 0.2}
    found = merged([reach], Budget(4, 5), _most, branches=True)
    assert _paths(found.parents, found.tokens[0]) == [(1,), (1, 2), (3,), (3, 5), (1, 4)]
    assert _paths(*_first(merged([reach], Budget(4, 3), _most, branches=True))) == [(1,), (1, 2), (3,)]
    assert _paths(*_first(merged([reach], Budget(1, 3), _most, branches=True))) == [(1,), (3,)]
    assert _paths(*_first(merged([reach], Budget(4, 5), _most, branches=False))) == [(1,), (1, 2)]


def _first(found: Merged) -> tuple[tuple[int, ...], list[int | None]]:
    return found.parents, found.tokens[0]


def test_a_tree_is_as_large_as_pays() -> None:
    reach: dict[TokenPath, float] = {(1,): 0.5, (2,): 0.3, (3,): 0.1}

    def promise(nodes: int, committed: float) -> float:
        return (1 + committed) / (1 + 0.25 * nodes)

    assert len(merged([reach], Budget(4, 7), promise, branches=True).parents) == 1
    assert merged([{(1,): 0.01}], Budget(4, 7), promise, branches=True).parents == ()
    assert merged([{}], Budget(4, 7), promise, branches=True).parents == ()


def test_rows_share_a_shape_and_have_tokens_of_their_own() -> None:
    rows: list[dict[TokenPath, float]] = [{(1,): 0.9, (1, 2): 0.8}, {(5,): 0.5, (6,): 0.4}]
    found = merged(rows, Budget(4, 3), _most, branches=True)
    assert found.parents == (-1, 0, -1)
    assert found.tokens == [[1, 2, None], [5, None, 6]]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=8), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 8),
    st.booleans(),
)
def test_every_node_comes_after_its_parent_and_is_one_that_was_offered(
    rows: list[list[list[int]]], depth: int, more: int, branches: bool
) -> None:
    trust = Trust()
    offered = [trust.reach(Offer(1, counted((1.0, each) for each in row))) for row in rows]
    found = merged(offered, Budget(depth, depth + more), _most, branches)
    tree = Tree(found.parents)
    assert tree.depth <= depth
    assert len(tree) <= depth + more
    assert branches or tree.is_chain
    for reach, tokens in zip(offered, found.tokens, strict=True):
        chosen = [path for path in _paths(found.parents, tokens) if None not in path]
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= reach.keys()


def test_trust_follows_what_is_accepted_by_kind() -> None:
    trust, offer, other = Trust(), Offer(3, {(1,): 0.5, (1, 2): 0.5}), Offer(1, {(4,): 0.25})
    tree, tokens = Tree((-1, 0, -1)), [1, 2, 4]
    assert trust.reach(offer) == {(1,): 0.5, (1, 2): 0.25}
    for _ in range(20):
        trust.count(offer, tree, tokens, [0, 1])
        trust.count(other, tree, tokens, [0, 1])
    # Both levels were accepted, of 0.5 each: twice as often as promised, but for what was held at first. Never 4.
    assert trust.reach(offer)[(1,)] == pytest.approx(0.5 * 44 / 24)
    assert trust.reach(other)[(4,)] == pytest.approx(0.25 * 4 / 9)
    assert trust.reach(Offer(2, {(1,): 0.5})) == {(1,): 0.5}
