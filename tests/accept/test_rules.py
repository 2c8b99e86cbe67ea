"""Rules by name, and what relaxed ones do: as their papers say."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.snippets import Invoke
from selfspec.accept import (
    Block,
    Rule,
    TokenLevel,
    TopKTolerance,
    Typical,
    find_rule,
    rule_name,
    rules,
    with_fields,
)
from selfspec.cache.tree import Tree
from selfspec.draft import Draft
from selfspec.errors import UnsupportedOptionError

ROOT = Path(__file__).parents[2]


def test_only_names_that_say_so_are_not_lossless() -> None:
    assert all(rule.lossless != name.startswith("relaxed-") for name, rule in rules().items())


def test_the_docs_and_the_command_line_list_what_is_declared(invoke: Invoke) -> None:
    rows, listed = [], []
    for name, rule in rules().items():
        assert isinstance(rule, Block | TokenLevel | Typical | TopKTolerance)
        written, lossless = with_fields(name, rule), "yes" if rule.lossless else "no"
        rows.append(f"| `{written}` | {lossless} | {rule.help} |")
        listed.append((name, written, rule.lossless, rule.help))
    assert "\n".join(["| rule | lossless | |", "|---|---|---|", *rows, ""]) in (ROOT / "docs/exactness.md").read_text()
    found = json.loads(invoke("drafts", "--output", "json").stdout)["rules"]
    assert [(each["name"], each["written"], each["lossless"], each["help"]) for each in found] == listed
    assert all(name in invoke("drafts").stdout for name in rules())


@pytest.mark.parametrize("name", rules())
def test_results_say_whether_they_are_lossless(llama: PreTrainedModel, name: str) -> None:
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), accept=with_fields(name, rules()[name]), draft_length=4)
    output = spec.generate(tiny.prompt(4), max_new_tokens=20, do_sample=True, top_k=None, seed=0)
    assert output.lossless == rules()[name].lossless


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("typical", "no acceptance rule 'typical'; choose one of block"),
        ("no-rule:epsilon=1", "no acceptance rule"),
        ("no_module:Rule", "no acceptance rule"),
        ("selfspec.draft:EarlyExit", "is no acceptance rule"),
        ("token:epsilon=1", "takes no 'epsilon=1'"),
        ("relaxed-typical:eps=0.1", "takes no 'eps=0.1'"),
        ("relaxed-typical:epsilon", "takes no 'epsilon'"),
        ("relaxed-typical:epsilon=import os", "takes no"),
        ("relaxed-typical:epsilon=2", "epsilon is a chance"),
    ],
)
def test_other_names_are_refused(name: str, said: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=said):
        find_rule(name)


@dataclass(frozen=True)
class Own(TokenLevel):
    """A rule of one's own."""

    strict: bool = False


OWN = f"{Own.__module__}:Own"


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (Typical(0.1), "relaxed-typical:epsilon=0.1,delta=0.09"),
        (Typical(delta=0.2), "relaxed-typical:epsilon=0.3,delta=0.2"),
        (TopKTolerance(5, 2.0), "relaxed-top-k:top_k=5,tolerance=2.0"),
        (Block(), "block"),
        (TokenLevel(), "token"),
        (Own(), OWN),
        (Own(strict=True), f"{OWN}:strict=True"),
    ],
)
def test_a_name_says_the_fields_of_a_rule(rule: Rule, name: str) -> None:
    assert rule_name(rule) == name
    assert find_rule(name) == find_rule(name.replace(",", ", ")) == rule


def test_relaxed_rules_keep_what_is_likely_for_the_entropy_or_by_rank() -> None:
    p = torch.tensor([[[0.5, 0.3, 0.15, 0.05], [0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]]])
    rule = Typical(epsilon=0.3, delta=0.5)
    entropy = [-sum(x * math.log(x) for x in row.tolist()) for row in p[0]]
    for tokens in ([0, 0], [1, 1], [2, 0], [3, 2]):
        expected = [float(p[0, i, token] > min(0.3, 0.5 * math.exp(-entropy[i]))) for i, token in enumerate(tokens)]
        assert rule.accept_probs(Draft.chain(torch.tensor([tokens])), p, p.log()).tolist() == [expected]
    # Top-k with tolerance needs rank and likelihood.
    logits = torch.tensor([[[3.0, 2.5, 2.0, 1.9], [3.0, 1.0, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0]]])
    by_rank = TopKTolerance(top_k=2, tolerance=1.0)
    assert by_rank.accept_probs(Draft.chain(torch.tensor([[1, 0]])), logits, logits).tolist() == [[1.0, 1.0]]
    # The third likeliest is out by rank, the second by likelihood.
    assert by_rank.accept_probs(Draft.chain(torch.tensor([[2, 1]])), logits, logits).tolist() == [[0.0, 0.0]]


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
