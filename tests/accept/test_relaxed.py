"""The relaxed rules do what their papers say, say that they are not lossless, and are found by name alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.accept import Block, Rule, TokenLevel, TopKTolerance, Typical, find_rule, rule_name, rules
from selfspec.draft import Draft
from selfspec.errors import UnsupportedOptionError


def test_only_names_that_say_so_are_not_lossless() -> None:
    assert {name for name, rule in rules().items() if not rule.lossless} == {"relaxed-typical", "relaxed-top-k"}


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


@pytest.mark.parametrize("name", ["token", "block", "coupled", "relaxed-typical", "relaxed-top-k"])
def test_results_say_whether_they_are_lossless(llama: PreTrainedModel, name: str) -> None:
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), accept=name, draft_length=4)
    output = spec.generate(tiny.prompt(4), max_new_tokens=20, do_sample=True, top_k=None, seed=0)
    assert output.lossless == (not name.startswith("relaxed"))


def test_a_relaxed_rule_accepts_more_and_gives_other_text(llama: PreTrainedModel) -> None:
    ids = tiny.prompt(4)
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(3), draft_length=4)
    exact = spec.generate(ids, max_new_tokens=40, do_sample=False)
    relaxed = spec.generate(ids, max_new_tokens=40, do_sample=False, accept=TopKTolerance(top_k=10, tolerance=4.0))
    assert relaxed.stats.acceptance_rate > exact.stats.acceptance_rate
    assert not torch.equal(relaxed.sequences, exact.sequences)


def test_an_unknown_name_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(
        selfspec.errors.UnsupportedOptionError, match="no acceptance rule 'typical'; choose one of block"
    ):
        selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), accept="typical", draft_length=4)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no-rule:epsilon=1", "no acceptance rule"),
        ("no_module:Rule", "no acceptance rule"),
        ("token:epsilon=1", "takes no 'epsilon=1'"),
        ("relaxed-typical:eps=0.1", "takes no 'eps=0.1'"),
        ("relaxed-typical:epsilon", "takes no 'epsilon'"),
        ("relaxed-typical:epsilon=import os", "takes no"),
        ("relaxed-typical:epsilon=2", "epsilon is a chance"),
    ],
)
def test_only_names_and_classes_are_rules(name: str, said: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=said):
        find_rule(name)


@pytest.mark.parametrize("rule", [Typical(0.1), Typical(delta=0.2), TopKTolerance(5, 2.0), Block(), TokenLevel()])
def test_a_name_says_the_fields_of_a_rule(rule: Rule) -> None:
    name = rule_name(rule)
    assert name is not None
    assert find_rule(name) == rule
    assert find_rule("relaxed-top-k:top_k=5, tolerance=2.0") == TopKTolerance(5, 2.0)


def test_a_rule_is_named_by_its_class(llama: PreTrainedModel) -> None:
    rule = find_rule(f"{Own.__module__}:Own")
    assert rule == Own()
    assert rule_name(rule) == f"{Own.__module__}:Own"
    assert find_rule(f"{Own.__module__}:Own:strict=True") == Own(strict=True)
    assert rule_name(Own(strict=True)) == f"{Own.__module__}:Own:strict=True"
    assert rule_name(Block()) == "block"
    with pytest.raises(UnsupportedOptionError, match="is no acceptance rule"):
        find_rule("selfspec.draft:EarlyExit")


@dataclass(frozen=True)
class Own(TokenLevel):
    """A rule of one's own."""

    strict: bool = False
