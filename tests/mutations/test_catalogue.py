"""Every bug of the catalogue can be planted in the code as it is, and has tests to meet."""

from __future__ import annotations

from collections import Counter

import pytest

from mutations.anchor import Sources
from mutations.catalogue import CATALOGUE, Mutation
from mutations.selection import Suite
from mutations.trial import ROOT


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(ROOT)


@pytest.fixture(scope="module")
def suite() -> Suite:
    return Suite(ROOT)


@pytest.mark.parametrize("part", ["names", "bugs"])
def test_none_is_there_twice(part: str) -> None:
    each = [
        mutation.name if part == "names" else (mutation.at, mutation.right, mutation.wrong) for mutation in CATALOGUE
    ]
    assert [what for what, count in Counter(each).items() if count > 1] == []


@pytest.mark.parametrize("mutation", CATALOGUE, ids=lambda mutation: mutation.name)
def test_a_bug_can_be_planted_and_has_tests_to_meet(mutation: Mutation, sources: Sources, suite: Suite) -> None:
    sources.planted(mutation)
    suite.arguments(mutation)
