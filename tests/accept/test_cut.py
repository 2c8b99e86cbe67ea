"""A row that is cut to what the row beside it commits still commits exactly the target's joint, in closed form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.exact import Chain, Committed, committed_in_step, conditionals
from selfspec.accept import Block, Rule, TokenLevel
from selfspec.cache.tree import Tree

RULES = pytest.mark.parametrize("rule", [TokenLevel(), Block()], ids=["token", "block"])


@RULES
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(2, 3), st.integers(2, 3), st.integers(0, 2**32))
def test_two_rows_that_share_the_length_of_their_drafts_are_cut_exactly(
    rule: Rule, vocab: int, beside: int, seed: int
) -> None:
    # What the other row commits depends on where drafts end, and so on what this row drafted.
    generator, longest = torch.Generator().manual_seed(seed), 3 if vocab * beside < 9 else 2
    rows = [
        (conditionals(size, range(1, longest + 2), generator), conditionals(size, range(1, longest + 1), generator))
        for size in (vocab, beside)
    ]
    goes_on = [torch.rand(vocab**tokens, beside**tokens, generator=generator) < 0.6 for tokens in range(1, longest)]
    result = committed_in_step(rule, rows[0], rows[1], goes_on)
    torch.testing.assert_close(result.joint, rows[0][0].joint(), atol=1e-12, rtol=0)


# A level of the tree is complete before the next one begins; and one that goes deep first.
BY_LEVELS, DEEP_FIRST = Tree((-1, -1, 0)), Tree((-1, 0, -1))


def pairs_in_step(rule: Rule, tree: Tree, seed: int) -> tuple[Chain, Committed]:
    """The target of a row, and what the row commits where both rows' tokens decide how far the tree grows."""
    generator = torch.Generator().manual_seed(seed)
    p, p_beside = (conditionals(2, range(1, tree.depth + 2), generator) for _ in range(2))
    q, q_beside = (conditionals(2, range(1, len(tree) + 1), generator) for _ in range(2))
    goes_on = [torch.rand(2**nodes, 2**nodes, generator=generator) < 0.6 for nodes in range(1, len(tree))]
    return p, committed_in_step(rule, (p, q), (p_beside, q_beside), goes_on, tree)


@RULES
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_two_rows_that_share_a_tree_grown_level_by_level_are_cut_exactly(rule: Rule, seed: int) -> None:
    p, result = pairs_in_step(rule, BY_LEVELS, seed)
    torch.testing.assert_close(result.joint, p.joint(), atol=1e-12, rtol=0)


def test_a_tree_that_grows_deep_first_as_its_tokens_say_is_not_cut_exactly() -> None:
    # Whether the first place gets a second child, and so how many tokens the other row may commit, depends on the
    # second token of this row.
    p, result = pairs_in_step(TokenLevel(), DEEP_FIRST, 13)
    assert (result.joint - p.joint()).abs().max() > 1e-3
