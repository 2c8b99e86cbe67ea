"""Every bug of the catalogue can be planted in the code as it is, and has tests to meet."""

from __future__ import annotations

from collections import Counter

import pytest

from mutations.anchor import AnchorError, Sources
from mutations.catalogue import CATALOGUE, Mutation
from mutations.run import ROOT
from mutations.selection import SelectionError, Suite


@pytest.mark.parametrize("part", ["names", "bugs"])
def test_none_is_there_twice(part: str) -> None:
    each = [
        mutation.name if part == "names" else (mutation.at, mutation.right, mutation.wrong) for mutation in CATALOGUE
    ]
    assert [what for what, count in Counter(each).items() if count > 1] == []


def _unsound(mutation: Mutation, sources: Sources, suite: Suite) -> str | None:
    try:
        sources.planted(mutation)
        suite.arguments(mutation)
    except (AnchorError, SelectionError) as error:
        return str(error)
    return None


def test_bugs_can_be_planted_and_have_tests_to_meet() -> None:
    sources, suite = Sources(ROOT), Suite(ROOT)
    assert [found for mutation in CATALOGUE if (found := _unsound(mutation, sources, suite))] == []
