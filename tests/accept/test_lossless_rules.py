"""Token by token and as a block, exactly the target's joint is committed; a block never commits less of a draft."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.chains import Case, cases
from helpers.exact import Chain, committed, committed_with_stops
from selfspec.accept import Block, Rule, TokenLevel
from selfspec.cache.tree import Tree
from selfspec.draft import Draft

each_rule = pytest.mark.parametrize("rule", [Block(), TokenLevel()], ids=["block", "token"])


@each_rule
@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases())
def test_commits_the_target_joint_exactly(rule: Rule, case: Case) -> None:
    result = committed(rule, case.p, case.q)
    torch.testing.assert_close(result.joint, case.p.joint(), atol=case.tolerance, rtol=0)


@each_rule
def test_a_token_that_is_hardly_ever_drafted_has_a_chance_like_any_other(rule: Rule) -> None:
    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]]])
    q = torch.tensor([[[0.5, 0.5], [1.0, 1e-40]]])
    chances = rule.accept_probs(Draft.chain(torch.tensor([[0, 1]]), q), p, p)
    assert ((chances >= 0) & (chances <= 1)).all()


@each_rule
@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases(), st.integers(0, 2**32))
def test_a_deterministic_draft_commits_the_target_joint_exactly(rule: Rule, case: Case, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(case.p.vocab, (1, len(case.p.tables) - 1), generator=generator)
    result = committed(rule, case.p, None, drafts)
    torch.testing.assert_close(result.joint, case.p.joint(), atol=case.tolerance, rtol=0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases())
def test_never_commits_less_than_token_level(case: Case) -> None:
    block, token = committed(Block(), case.p, case.q), committed(TokenLevel(), case.p, case.q)
    assert block.length >= token.length - len(case.q.tables) * case.tolerance


def test_commits_more_than_token_level_in_the_example_of_the_paper() -> None:
    # Section 3 of the paper: two letters, p(A) = 1/3 and q(A) = 2/3 at every position, two drafted tokens: token by
    # token 10/9 of the draft is accepted, as a block 11/9.
    p, q = torch.tensor([1 / 3, 2 / 3]).double(), torch.tensor([2 / 3, 1 / 3]).double()
    target = Chain(tuple(p.expand([2] * i + [2]) for i in range(3)))
    draft = Chain(tuple(q.expand([2] * i + [2]) for i in range(2)))
    assert committed(TokenLevel(), target, draft).length == pytest.approx(10 / 9)
    assert committed(Block(), target, draft).length == pytest.approx(11 / 9)


@each_rule
@settings(max_examples=120, deadline=None, derandomize=True)
@given(cases(), st.integers(0, 2**32))
def test_drafts_that_end_where_their_tokens_say_commit_the_target_joint_exactly(
    rule: Rule, case: Case, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    longest = len(case.p.tables) - 1
    goes_on = [torch.rand([case.p.vocab] * tokens, generator=generator) < 0.5 for tokens in range(1, longest)]
    if longest:
        result = committed_with_stops(rule, case.p, case.q, goes_on)
        torch.testing.assert_close(result.joint, case.p.joint(), atol=case.tolerance, rtol=0)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(2, 64), st.integers(0, 2**32))
def test_token_by_token_accepts_one_minus_total_variation(vocab: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, vocab, generator=generator, dtype=torch.float64).softmax(-1)
    follow = torch.full((vocab, vocab), 1 / vocab, dtype=torch.float64)
    result = committed(TokenLevel(), Chain((p, follow)), Chain((q,)))
    assert result.length == pytest.approx(1 - 0.5 * float((p - q).abs().sum()), abs=1e-12)


class SwappedRatio(TokenLevel):
    def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
        assert draft.probs is not None
        index = draft.tokens[..., None]
        ratio = draft.probs.gather(-1, index) / p[:, : draft.tokens.shape[1]].gather(-1, index)
        return ratio[..., 0].clamp(max=1.0)


class ResidualFromP(TokenLevel):
    def recovery_probs(self, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
        return p[torch.arange(len(p)), place]


class BonusFromQ(TokenLevel):
    def recovery_probs(self, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
        assert draft.probs is not None
        weights = super().recovery_probs(draft, p, place)
        return torch.where((place == draft.tokens.shape[1])[:, None], draft.probs[:, -1], weights)


class EveryDrawCounts(TokenLevel):
    def accepted(self, mask: Tensor, tree: Tree) -> Tensor:
        return mask.long().sum(-1)


@pytest.mark.parametrize("planted", [SwappedRatio(), ResidualFromP(), BonusFromQ(), EveryDrawCounts()])
def test_the_proof_sees_a_planted_error(planted: TokenLevel) -> None:
    generator = torch.Generator().manual_seed(0)

    def chain(length: int) -> Chain:
        return Chain(
            tuple(
                (2 * torch.randn([3] * (i + 1), generator=generator, dtype=torch.float64)).softmax(-1)
                for i in range(length)
            )
        )

    p, q = chain(3), chain(2)
    assert (committed(TokenLevel(), p, q).joint - p.joint()).abs().max() < 1e-12
    assert (committed(planted, p, q).joint - p.joint()).abs().max() > 1e-3


def test_equal_p_and_q_that_leave_no_residual_fall_back_to_p() -> None:
    p = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    weights = TokenLevel().recovery_probs(Draft.chain(torch.tensor([[1]]), p[:, :1]), p, torch.tensor([0]))
    assert torch.equal(weights, p[:, 0])
