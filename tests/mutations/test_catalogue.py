"""The catalogue fits the code as it stands; the slow tier plants every bug in it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mutations.catalogue import CATALOGUE, Mutation
from mutations.trial import ROOT, planted, try_mutation


def test_there_are_at_least_twenty_and_none_twice() -> None:
    assert len(CATALOGUE) >= 20
    assert len({mutation.name for mutation in CATALOGUE}) == len(CATALOGUE)
    assert len({(mutation.file, mutation.right, mutation.wrong) for mutation in CATALOGUE}) == len(CATALOGUE)


@pytest.mark.parametrize("mutation", CATALOGUE, ids=lambda mutation: mutation.name)
def test_a_bug_can_be_planted_and_has_tests_to_meet(mutation: Mutation) -> None:
    text = planted(mutation)
    if mutation.file.endswith(".py"):
        ast.parse(text)
    for name in mutation.tests:
        file, _, test = name.partition("::")
        if file.startswith("tests/"):
            assert f"def {test}" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("mutation", CATALOGUE, ids=lambda mutation: mutation.name)
def test_the_suite_catches_it(mutation: Mutation, tmp_path: Path) -> None:
    outcome = try_mutation(tmp_path, mutation)
    assert outcome.caught, outcome.said
