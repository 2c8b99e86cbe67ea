"""Paths in trees that a mask accepts, and what all rules do with a p that leaves no choice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.exact import trees
from selfspec.accept import Block, Coupled, Rule, TokenLevel
from selfspec.accept.tree_paths import first_path, longest_path
from selfspec.cache.tree import Tree
from selfspec.draft import Draft


@settings(max_examples=100, deadline=None, derandomize=True)
@given(trees(12), st.integers(0, 2**32), st.sampled_from([TokenLevel(), Block(), Coupled()]))
def test_where_one_token_is_possible_the_path_that_says_it_is_accepted(tree: Tree, seed: int, rule: Rule) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, (8, len(tree)), generator=generator)
    chosen = torch.randint(3, (8, len(tree) + 1), generator=generator)
    draft, p = Draft(tokens, tree), torch.nn.functional.one_hot(chosen, 3).double()
    mask = torch.rand(tokens.shape, generator=generator) < rule.accept_probs(draft, p, p.log())
    place = rule.accepted(mask, tree)
    found = rule.recovery_probs(draft, p, place)
    for row in range(8):
        expected = 0
        while True:
            children = [node for node in tree.children[expected] if tokens[row, node] == chosen[row, expected]]
            if not children:
                break
            expected = children[0] + 1
        assert place[row] == expected
        assert found[row].nonzero().flatten().tolist() == [chosen[row, expected]]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(trees(12), st.integers(0, 2**32))
def test_paths_of_a_mask(tree: Tree, seed: int) -> None:
    mask = torch.rand(20, len(tree), generator=torch.Generator().manual_seed(seed)) < 0.7
    first, longest = first_path(mask, tree).tolist(), longest_path(mask, tree).tolist()
    for row, accepts in enumerate(mask.tolist()):
        place = 0
        while children := [node for node in tree.children[place] if accepts[node]]:
            place = children[0] + 1
        assert first[row] == place
        whole = [node for node, path in enumerate(tree.paths) if all(accepts[each] for each in path)]
        assert longest[row] == max(whole, key=lambda node: tree.depths[node], default=-1) + 1


def test_a_chain_is_read_as_a_tree_would_be() -> None:
    mask = torch.tensor([[True, True, False, True], [False] * 4, [True] * 4])
    chain = Tree.chain(4)
    assert first_path(mask, chain).tolist() == longest_path(mask, chain).tolist() == [2, 0, 4]


def test_a_draft_has_as_many_tokens_as_its_tree_has_nodes() -> None:
    with pytest.raises(ValueError, match="3 tokens a row has a tree of 6 nodes"):
        Draft(torch.zeros(1, 3, dtype=torch.long), Tree((-1, -1, 0, 0, 1, 2)))
