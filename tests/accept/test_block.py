"""Block verification commits exactly the target's joint, and never less of a draft than token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.chains import Case, cases
from helpers.exact import Chain, committed, committed_with_stops
from selfspec.accept import Block, Rule, TokenLevel


@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases())
def test_commits_the_target_joint_exactly(case: Case) -> None:
    result = committed(Block(), case.p, case.q)
    torch.testing.assert_close(result.joint, case.p.joint(), atol=case.tolerance, rtol=0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases(), st.integers(0, 2**32))
def test_a_deterministic_draft_commits_the_target_joint_exactly(case: Case, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(case.p.vocab, (1, len(case.p.tables) - 1), generator=generator)
    result = committed(Block(), case.p, None, drafts)
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


@pytest.mark.parametrize("rule", [Block(), TokenLevel()], ids=["block", "token"])
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
