"""Rules over trees: the lossless ones commit exactly the target's joint, shown in closed form over generated trees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.chains import TreeCase, tree_cases, trees, without
from helpers.exact import Chain, all_drafts, committed, committed_when_cut, committed_with_stops
from selfspec.accept import Block, Coupled, Rule, TokenLevel, TopKTolerance, Typical
from selfspec.accept.tree_paths import first_path, longest_path
from selfspec.cache.tree import Tree
from selfspec.draft import Draft

EXACT = 1e-12
both = pytest.mark.parametrize("rule", [TokenLevel(), Block()], ids=["token", "block"])
FORK = Tree((-1, -1, 0, 0, 1, 2))


def _heights_of_siblings(tree: Tree) -> list[list[int]]:
    """How deep it goes below each child of each place."""
    deepest = [
        max(tree.depths[other] for other, path in enumerate(tree.paths) if node in path) for node in range(len(tree))
    ]
    return [[deepest[child] for child in children] for children in tree.children]


@both
@settings(max_examples=300, deadline=None, derandomize=True)
@given(tree_cases())
def test_drawn_siblings_commit_the_target_joint_exactly(rule: Rule, case: TreeCase) -> None:
    result = committed(rule, case.p, case.q, tree=case.tree)
    torch.testing.assert_close(result.joint, case.p.joint(), atol=EXACT, rtol=0)


@both
@settings(max_examples=150, deadline=None, derandomize=True)
@given(tree_cases(), st.integers(0, 2**32))
def test_siblings_that_were_not_drawn_commit_the_target_joint_exactly(rule: Rule, case: TreeCase, seed: int) -> None:
    # Of so few tokens siblings are often alike.
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(case.p.vocab, (1, len(case.tree)), generator=generator)
    result = committed(rule, case.p, None, drafts, case.tree)
    torch.testing.assert_close(result.joint, case.p.joint(), atol=EXACT, rtol=0)


@both
@settings(max_examples=100, deadline=None, derandomize=True)
@given(tree_cases(), st.integers(0, 2**32))
def test_trees_that_end_where_their_tokens_say_commit_the_target_joint_exactly(
    rule: Rule, case: TreeCase, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = ([case.p.vocab] * nodes for nodes in range(1, len(case.tree)))
    goes_on = [torch.rand(shape, generator=generator) < 0.6 for shape in shapes]
    result = committed_with_stops(rule, case.p, case.q, goes_on, case.tree)
    torch.testing.assert_close(result.joint, case.p.joint(), atol=EXACT, rtol=0)


@both
@settings(max_examples=60, deadline=None, derandomize=True)
@given(tree_cases(), st.integers(0, 2**32))
def test_a_cut_that_is_drawn_on_its_own_commits_the_target_joint_exactly(rule: Rule, case: TreeCase, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(case.tree.depth + 1, generator=generator, dtype=torch.float64)
    chances = (chances / chances.sum()).expand(case.p.vocab ** len(case.tree), -1)
    result = committed_when_cut(rule, case.p, case.q, chances, case.tree)
    torch.testing.assert_close(result.joint, case.p.joint(), atol=EXACT, rtol=0)


@pytest.mark.statistical
@settings(max_examples=300, deadline=None, derandomize=True)
@given(tree_cases())
def test_a_block_never_commits_less_than_token_level_where_no_sibling_is_followed_by_a_deeper_one(
    case: TreeCase,
) -> None:
    assume(case.drawn != "anyhow")
    assume(all(heights == sorted(heights, reverse=True) for heights in _heights_of_siblings(case.tree)))
    block, token = (committed(rule, case.p, case.q, tree=case.tree).length for rule in (Block(), TokenLevel()))
    assert block >= token - EXACT


@both
@settings(max_examples=60, deadline=None, derandomize=True)
@given(tree_cases())
def test_a_sibling_more_is_never_worse(rule: Rule, case: TreeCase) -> None:
    last = len(case.tree) - 1
    if last and case.tree.depth == Tree(case.tree.parents[:last]).depth:
        fewer = committed(rule, case.p, Chain(case.q.tables[:last]), tree=Tree(case.tree.parents[:last]))
        assert committed(rule, case.p, case.q, tree=case.tree).length >= fewer.length - EXACT


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(2, 5), st.integers(0, 2**32))
def test_all_tokens_drawn_without_replacement_hold_the_target_token(vocab: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, vocab, generator=generator, dtype=torch.float64).softmax(-1)
    tree = Tree((-1,) * vocab)
    before = [all_drafts(vocab, node) for node in range(vocab)]
    tables = [without(q.expand(len(drawn), -1), drawn).reshape([vocab] * (drawn.shape[1] + 1)) for drawn in before]
    result = committed(TokenLevel(), Chain((p, p.expand(vocab, -1))), Chain(tuple(tables)), tree=tree)
    assert result.length == pytest.approx(1, abs=EXACT)


# What the proof is good for: planted errors.


class SiblingsForgotten(TokenLevel):
    """Each sibling against the whole of p."""

    def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
        parents = torch.tensor(draft.tree.parents) + 1
        index = draft.tokens[..., None]
        assert draft.probs is not None
        return (p[:, parents].gather(-1, index) / draft.probs.gather(-1, index))[..., 0].clamp(max=1.0)


class ParentsForgotten(TokenLevel):
    """The last node whose own draw fell within its chance."""

    def accepted(self, mask: Tensor, tree: Tree) -> Tensor:
        return (mask * torch.arange(1, len(tree) + 1)).amax(-1)


class LastChildOnly(TokenLevel):
    """The residual of the last child of a place, taken from p itself."""

    def recovery_probs(self, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
        children = draft.tree.children[int(place[0])]
        assert draft.probs is not None
        here = p[:, int(place[0])]
        return (here - draft.probs[:, children[-1]]).clamp_min(0.0) if children else here


@pytest.mark.parametrize(
    "planted", [SiblingsForgotten(), ParentsForgotten(), LastChildOnly()], ids=lambda r: type(r).__name__
)
def test_the_proof_sees_a_planted_error(planted: TokenLevel) -> None:
    generator = torch.Generator().manual_seed(0)

    def chain(length: int) -> Chain:
        shapes = ([3] * (i + 1) for i in range(length))
        logits = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        return Chain(tuple(each.softmax(-1) for each in logits))

    p, q = chain(FORK.depth + 1), chain(len(FORK))
    assert (committed(TokenLevel(), p, q, tree=FORK).joint - p.joint()).abs().max() < EXACT
    assert (committed(planted, p, q, tree=FORK).joint - p.joint()).abs().max() > 1e-3


# The other rules.


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


@both
def test_a_place_without_a_distribution_accepts_no_child_and_recovers_nothing(rule: Rule) -> None:
    p = torch.full((1, 7, 3), 1 / 3)
    p[:, 1] = 0.0
    tokens = torch.tensor([[0, 1, 0, 1, 2, 0]])
    for probs in (None, torch.full((1, 6, 3), 1 / 3)):
        draft = Draft(tokens, FORK, probs)
        chances = rule.accept_probs(draft, p, p.log())
        assert chances.isfinite().all()
        assert chances[0, [2, 3]].tolist() == [0.0, 0.0]
        assert rule.recovery_probs(draft, p, torch.tensor([1])).tolist() == [[0.0, 0.0, 0.0]]


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


@pytest.mark.parametrize("rule", [Typical(epsilon=0.2, delta=1.0), TopKTolerance(top_k=2, tolerance=9.0)], ids=str)
def test_relaxed_rules_judge_a_child_by_the_place_of_its_parent_and_take_the_longest_path(rule: Rule) -> None:
    p = torch.tensor([0.0, 0.1, 0.4, 0.5]).expand(1, 7, 4).clone()
    # After the first child everything likely is token 1.
    p[:, 1] = torch.tensor([0.4, 0.5, 0.1, 0.0])
    draft = Draft(torch.tensor([[3, 2, 3, 2, 3, 1]]), FORK)
    chances = rule.accept_probs(draft, p, p.log())
    assert chances.tolist() == [[1.0, 1.0, 0.0, 0.0, 1.0, 0.0]]
    place = rule.accepted(chances > 0, FORK)
    assert place.tolist() == [5]
    assert torch.equal(rule.recovery_probs(draft, p, place), p[:, 5])


def test_a_draft_has_as_many_tokens_as_its_tree_has_nodes() -> None:
    with pytest.raises(ValueError, match="3 tokens a row has a tree of 6 nodes"):
        Draft(torch.zeros(1, 3, dtype=torch.long), FORK)
