"""The spread of drafts, and what drafts are called."""

from __future__ import annotations

import pytest

import selfspec
from selfspec.cli.options import read_draft
from selfspec.draft import Budget, Draft, RowsView, Stateless
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import draft_name
from selfspec.model.layer_path import Part
from selfspec.tools.verify.verification import default_drafts


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 12, 80])
def test_every_depth_has_drafts_that_fit_and_differ(depth: int) -> None:
    drafts = default_drafts(depth)
    assert len(drafts) == {1: 2, 2: 3, 3: 5}.get(depth, 5)
    paths = set()
    for draft in drafts:
        assert isinstance(draft, LayerPathDrafter)
        paths.add(draft.path(depth))
    assert len(paths) == len(drafts)


def test_the_spread_covers_every_kind_of_resuming() -> None:
    names = [draft_name(draft) for draft in default_drafts(12)]
    assert names == ["exit:6", "exit:11", "skip:layers=6", "skip:attn=4", "skip:mlp=8"]
    paths = [draft.path(12) for draft in default_drafts(12) if isinstance(draft, LayerPathDrafter)]
    assert {path.resume_point.part for path in paths if path.resume_point} == {Part.ATTENTION, Part.MLP}


@pytest.mark.parametrize("text", ["exit:4", "skip:attn=3,5;mlp=4;layers=7,8", "skip:mlp=0", "none"])
def test_names_are_those_of_the_command_line(text: str) -> None:
    assert draft_name(read_draft(text)) == text  # type: ignore[arg-type]


def test_other_drafters_are_called_what_they_say() -> None:
    class Other(Stateless):
        def __init__(self, of: int) -> None:
            self.of = of

        def propose(self, batch: RowsView, budget: Budget) -> Draft:
            raise NotImplementedError

        def __repr__(self) -> str:
            return "Other()"

    assert draft_name(Other(1)) == "Other()"
    assert draft_name(selfspec.drafts.EarlyExit(3)) == "exit:3"
