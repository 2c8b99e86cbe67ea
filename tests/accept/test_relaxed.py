"""Relaxed rules do what their papers say."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.accept import Rule, TopKTolerance, Typical
from selfspec.cache.tree import Tree
from selfspec.draft import Draft


def test_typical_acceptance_keeps_what_is_likely_for_the_entropy() -> None:
    p = torch.tensor([[[0.5, 0.3, 0.15, 0.05], [0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]]])
    rule = Typical(epsilon=0.3, delta=0.5)
    entropy = [-sum(x * math.log(x) for x in row.tolist()) for row in p[0]]
    for tokens in ([0, 0], [1, 1], [2, 0], [3, 2]):
        expected = [float(p[0, i, token] > min(0.3, 0.5 * math.exp(-entropy[i]))) for i, token in enumerate(tokens)]
        assert rule.accept_probs(Draft.chain(torch.tensor([tokens])), p, p.log()).tolist() == [expected]


def test_top_k_with_tolerance_needs_rank_and_likelihood() -> None:
    logits = torch.tensor([[[3.0, 2.5, 2.0, 1.9], [3.0, 1.0, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0]]])
    rule = TopKTolerance(top_k=2, tolerance=1.0)
    assert rule.accept_probs(Draft.chain(torch.tensor([[1, 0]])), logits, logits).tolist() == [[1.0, 1.0]]
    # The third likeliest is out by rank, the second by likelihood.
    assert rule.accept_probs(Draft.chain(torch.tensor([[2, 1]])), logits, logits).tolist() == [[0.0, 0.0]]


def test_a_rejected_token_gives_way_to_the_target_own() -> None:
    p = torch.rand(3, 4, 5).softmax(-1)
    draft = Draft.chain(torch.zeros(3, 3, dtype=torch.long))
    weights = Typical().recovery_probs(draft, p, torch.tensor([0, 3, 1]))
    assert torch.equal(weights, torch.stack([p[0, 0], p[1, 3], p[2, 1]]))


@pytest.mark.parametrize("rule", [Typical(epsilon=0.2, delta=1.0), TopKTolerance(top_k=2, tolerance=9.0)], ids=str)
def test_relaxed_rules_judge_a_child_by_the_place_of_its_parent_and_take_the_longest_path(rule: Rule) -> None:
    p = torch.tensor([0.0, 0.1, 0.4, 0.5]).expand(1, 7, 4).clone()
    # After the first child everything likely is token 1.
    p[:, 1] = torch.tensor([0.4, 0.5, 0.1, 0.0])
    tree = Tree((-1, -1, 0, 0, 1, 2))
    draft = Draft(torch.tensor([[3, 2, 3, 2, 3, 1]]), tree)
    chances = rule.accept_probs(draft, p, p.log())
    assert chances.tolist() == [[1.0, 1.0, 0.0, 0.0, 1.0, 0.0]]
    place = rule.accepted(chances > 0, tree)
    assert place.tolist() == [5]
    assert torch.equal(rule.recovery_probs(draft, p, place), p[:, 5])


def test_a_relaxed_rule_accepts_more_and_gives_other_text(llama: PreTrainedModel) -> None:
    ids = tiny.prompt(4)
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(3), draft_length=4)
    exact = spec.generate(ids, max_new_tokens=40, do_sample=False)
    relaxed = spec.generate(ids, max_new_tokens=40, do_sample=False, accept=TopKTolerance(top_k=10, tolerance=4.0))
    assert relaxed.stats.acceptance_rate > exact.stats.acceptance_rate
    assert not torch.equal(relaxed.sequences, exact.sequences)
