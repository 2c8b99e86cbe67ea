"""Lossless rules commit exactly the target's joint, over generated chains and trees, in closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor

from helpers.exact import (
    Case,
    Chain,
    Committed,
    all_drafts,
    cases,
    committed,
    committed_in_step,
    committed_when_cut,
    committed_with_stops,
    conditionals,
    tree_cases,
    trees,
    without,
)
from selfspec.accept import Block, Rule, TokenLevel
from selfspec.accept.tree_paths import first_path, longest_path
from selfspec.cache.tree import Tree
from selfspec.draft import Draft

each_rule = pytest.mark.parametrize("rule", [Block(), TokenLevel()], ids=["block", "token"])
each_kind = pytest.mark.parametrize("kind", [cases(), tree_cases()], ids=["chains", "trees"])
FORK = Tree((-1, -1, 0, 0, 1, 2))


def generated(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@each_rule
@each_kind
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_drawn_drafts(rule: Rule, kind: st.SearchStrategy[Case], data: st.DataObject) -> None:
    case = data.draw(kind)
    result = committed(rule, case.p, case.q, tree=case.tree)
    torch.testing.assert_close(result.joint, case.p.joint(), atol=case.tolerance, rtol=0)


@each_rule
@each_kind
@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.data(), st.integers(0, 2**32))
def test_drafts_that_were_not_drawn(rule: Rule, kind: st.SearchStrategy[Case], data: st.DataObject, seed: int) -> None:
    # Of so few tokens siblings are often alike.
    case = data.draw(kind)
    drafts = torch.randint(case.p.vocab, (1, len(case.tree)), generator=generated(seed))
    result = committed(rule, case.p, None, drafts, case.tree)
    torch.testing.assert_close(result.joint, case.p.joint(), atol=case.tolerance, rtol=0)


@each_rule
@each_kind
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data(), st.integers(0, 2**32))
def test_drafts_that_end_where_their_tokens_say(
    rule: Rule, kind: st.SearchStrategy[Case], data: st.DataObject, seed: int
) -> None:
    case = data.draw(kind)
    assume(len(case.tree))
    result = committed_with_stops(rule, case.p, case.q, case.stops(generated(seed)), case.tree)
    torch.testing.assert_close(result.joint, case.p.joint(), atol=case.tolerance, rtol=0)


@each_rule
@each_kind
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.integers(0, 2**32))
def test_rounds_that_are_cut_by_a_draw_of_its_own(
    rule: Rule, kind: st.SearchStrategy[Case], data: st.DataObject, seed: int
) -> None:
    case = data.draw(kind)
    assume(len(case.tree))
    chances = torch.rand(case.tree.depth + 1, generator=generated(seed), dtype=torch.float64).to(case.p.tables[0].dtype)
    chances = (chances / chances.sum()).expand(case.p.vocab ** len(case.tree), -1)
    result = committed_when_cut(rule, case.p, case.q, chances, case.tree)
    torch.testing.assert_close(result.joint, case.p.joint(), atol=case.tolerance, rtol=0)
    whole = committed(rule, case.p, case.q, tree=case.tree).length
    assert result.length <= whole + case.tolerance * len(case.tree)


@each_rule
def test_a_token_that_is_hardly_ever_drafted_has_a_chance_like_any_other(rule: Rule) -> None:
    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]]])
    q = torch.tensor([[[0.5, 0.5], [1.0, 1e-40]]])
    chances = rule.accept_probs(Draft.chain(torch.tensor([[0, 1]]), q), p, p)
    assert ((chances >= 0) & (chances <= 1)).all()
    # A place without a distribution accepts no child and recovers nothing.
    p = torch.full((1, 7, 3), 1 / 3)
    p[:, 1] = 0.0
    tokens = torch.tensor([[0, 1, 0, 1, 2, 0]])
    for probs in (None, torch.full((1, 6, 3), 1 / 3)):
        draft = Draft(tokens, FORK, probs)
        chances = rule.accept_probs(draft, p, p.log())
        assert chances.isfinite().all()
        assert chances[0, [2, 3]].tolist() == [0.0, 0.0]
        assert rule.recovery_probs(draft, p, torch.tensor([1])).tolist() == [[0.0, 0.0, 0.0]]


def test_equal_p_and_q_that_leave_no_residual_fall_back_to_p() -> None:
    p = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    weights = TokenLevel().recovery_probs(Draft.chain(torch.tensor([[1]]), p[:, :1]), p, torch.tensor([0]))
    assert torch.equal(weights, p[:, 0])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases())
def test_a_block_never_commits_less_of_a_chain_than_token_by_token(case: Case) -> None:
    block, token = (committed(rule, case.p, case.q).length for rule in (Block(), TokenLevel()))
    assert block >= token - len(case.q.tables) * case.tolerance


@pytest.mark.statistical
@settings(max_examples=300, deadline=None, derandomize=True)
@given(tree_cases())
def test_nor_of_a_tree_in_which_no_sibling_is_followed_by_a_deeper_one(case: Case) -> None:
    tree = case.tree
    deepest = [
        max(tree.depths[other] for other, path in enumerate(tree.paths) if node in path) for node in range(len(tree))
    ]
    heights = [[deepest[child] for child in children] for children in tree.children]
    assume(case.drawn != "anyhow" and all(each == sorted(each, reverse=True) for each in heights))
    block, token = (committed(rule, case.p, case.q, tree=tree).length for rule in (Block(), TokenLevel()))
    assert block >= token - case.tolerance


def test_a_block_commits_more_in_the_example_of_the_paper() -> None:
    # Section 3 of the paper: two letters, p(A) = 1/3 and q(A) = 2/3 at every position, two drafted tokens: token by
    # token 10/9 of the draft is accepted, as a block 11/9.
    p, q = torch.tensor([1 / 3, 2 / 3]).double(), torch.tensor([2 / 3, 1 / 3]).double()
    target = Chain(tuple(p.expand([2] * i + [2]) for i in range(3)))
    draft = Chain(tuple(q.expand([2] * i + [2]) for i in range(2)))
    assert committed(TokenLevel(), target, draft).length == pytest.approx(10 / 9)
    assert committed(Block(), target, draft).length == pytest.approx(11 / 9)


@each_rule
@settings(max_examples=60, deadline=None, derandomize=True)
@given(tree_cases())
def test_a_sibling_more_is_never_worse(rule: Rule, case: Case) -> None:
    last = len(case.tree) - 1
    if last and case.tree.depth == Tree(case.tree.parents[:last]).depth:
        fewer = committed(rule, case.p, Chain(case.q.tables[:last]), tree=Tree(case.tree.parents[:last]))
        assert committed(rule, case.p, case.q, tree=case.tree).length >= fewer.length - case.tolerance


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(2, 5), st.integers(0, 2**32))
def test_all_tokens_drawn_without_replacement_hold_the_target_token(vocab: int, seed: int) -> None:
    p, q = torch.rand(2, vocab, generator=generated(seed), dtype=torch.float64).softmax(-1)
    before = [all_drafts(vocab, node) for node in range(vocab)]
    tables = [without(q.expand(len(drawn), -1), drawn).reshape([vocab] * (drawn.shape[1] + 1)) for drawn in before]
    target = Chain((p, p.expand(vocab, -1)))
    result = committed(TokenLevel(), target, Chain(tuple(tables)), tree=Tree((-1,) * vocab))
    assert result.length == pytest.approx(1, abs=1e-12)


# Paths in trees that a mask accepts.


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
    with pytest.raises(ValueError, match="3 tokens a row has a tree of 6 nodes"):
        Draft(torch.zeros(1, 3, dtype=torch.long), FORK)


def candidates_of(q: Tensor, count: int, replaced: bool) -> Chain:
    """Return the distribution of each sibling, given those before it."""
    tables = []
    for node in range(count):
        before = all_drafts(len(q), node)
        left = q.expand(len(before), -1) if replaced else without(q.expand(len(before), -1), before)
        tables.append(left.reshape([len(q)] * (node + 1)))
    return Chain(tuple(tables))


def optimum(p: Tensor, candidates: Chain) -> float:
    """The largest chance that the token drawn from p is among the candidates, over all couplings of the two.

    As a linear program: how much of each set of candidates goes to each of its tokens (Sun et al., 2023, arXiv
    2310.15141; Khisti et al., 2024, arXiv 2410.18234).
    """
    chances, drawn = candidates.joint().flatten().numpy(), all_drafts(len(p), len(candidates.tables)).tolist()
    ways = [(row, token) for row, tokens in enumerate(drawn) for token in set(tokens)]
    rows, tokens = np.zeros((len(drawn), len(ways))), np.zeros((len(p), len(ways)))
    for way, (row, token) in enumerate(ways):
        rows[row, way] = tokens[token, way] = 1
    bounds = np.concatenate([chances, p.numpy()])
    found: Any = linprog(-np.ones(len(ways)), A_ub=np.concatenate([rows, tokens]), b_ub=bounds)
    return float(-found.fun)


def _distributions(seed: int, vocab: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = (1.5 * torch.randn(2, vocab, generator=generator, dtype=torch.float64)).softmax(-1)
    return p, q


def _accepted(rule: Rule, p: Tensor, candidates: Chain) -> float:
    tree = Tree((-1,) * len(candidates.tables))
    return committed(rule, Chain((p, p.expand(len(p), -1))), candidates, tree=tree).length


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(1, 3), st.booleans())
def test_no_rule_accepts_more_than_the_optimum_and_of_one_candidate_both_reach_it(
    seed: int, vocab: int, count: int, replaced: bool
) -> None:
    p, q = _distributions(seed, vocab)
    candidates = candidates_of(q, count, replaced)
    best = optimum(p, candidates)
    for rule in (TokenLevel(), Block()):
        found = _accepted(rule, p, candidates)
        assert found <= best + 1e-8
        if count == 1:
            assert found == pytest.approx(best, abs=1e-8)
            assert best == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-8)


def test_recursive_rejection_without_replacement_comes_near_the_optimum() -> None:
    shares = []
    for seed in range(60):
        p, q = _distributions(seed, 5)
        with_, without_ = (candidates_of(q, 2, replaced) for replaced in (True, False))
        found, best = _accepted(TokenLevel(), p, without_), optimum(p, without_)
        # Two different candidates are worth more than two that may be one, to any rule.
        assert best >= optimum(p, with_) - 1e-8
        shares.append(found / best)
    assert 0.93 < sum(shares) / len(shares) < 0.95
    assert min(shares) > 0.8


@each_rule
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


@each_rule
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
