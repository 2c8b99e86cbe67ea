"""Rules by name: each is declared in its file alone, and its fields stand behind a colon."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.running import Invoke
from selfspec.accept import (
    Block,
    Rule,
    TokenLevel,
    TopKTolerance,
    Typical,
    declaration_of,
    find_rule,
    rule_name,
    rules,
    with_fields,
)
from selfspec.errors import UnsupportedOptionError

ROOT = Path(__file__).parents[2]


def test_only_names_that_say_so_are_not_lossless() -> None:
    assert all(rule.lossless != name.startswith("relaxed-") for name, rule in rules().items())


def test_the_docs_and_the_command_line_list_what_is_declared(invoke: Invoke) -> None:
    rows, listed = [], []
    for name, rule in rules().items():
        declared = declaration_of(type(rule))
        assert declared is not None
        written, lossless = with_fields(name, rule), "yes" if rule.lossless else "no"
        rows.append(f"| `{written}` | {lossless} | {declared.help} |")
        listed.append((name, written, rule.lossless, declared.help))
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
