"""Dynamic programming on hidden states, against all skip sets one by one."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from helpers import tiny
from selfspec.errors import DraftConfigError
from selfspec.measure.teacher_forced import LayerViews, TeacherForcedText, parts_run
from selfspec.model.layer_path import LayerPath, Sublayer
from selfspec.model.registry import find_adapter
from selfspec.tools.lab.drafts import Space
from selfspec.tools.lab.search import sets_by_similarity
from selfspec.tools.lab.table import Prices, prices_by_weights


def _text() -> tuple[TeacherForcedText, Space, Prices]:
    model = tiny.llama()
    adapter = find_adapter(model)
    text = TeacherForcedText(LayerViews(model, adapter), tiny.prompt(12, batch=2), 4)
    return text, Space.of(model, adapter, 2, 2), prices_by_weights(model, adapter)


@torch.no_grad()
def test_with_nothing_dropped_it_finds_the_most_similar_sets() -> None:
    text, space, prices = _text()

    def similarity(skipped: frozenset[Sublayer]) -> float:
        states = text.exact(0)
        for layer, parts in enumerate(parts_run(LayerPath.without(tiny.DEPTH, skipped))):
            states = text.run(layer, parts, states)
        return float(
            torch.cosine_similarity(states[:, 3:-1].float(), text.exact(tiny.DEPTH)[:, 3:-1].float(), -1).mean()
        )

    one_by_one = sorted(map(frozenset, combinations(space.choices, 2)), key=lambda each: -similarity(each))
    assert sets_by_similarity(text, space, prices, width=1000) == one_by_one
    found = sets_by_similarity(text, space, prices, width=2)
    assert set(found) < set(one_by_one)
    assert found[0] in one_by_one[:5]


@pytest.mark.parametrize(("fewest", "most"), [(0, 2), (3, 2), (1, 8), (9, None)])
def test_a_space_without_sets_is_refused(fewest: int, most: int | None) -> None:
    model = tiny.llama()
    with pytest.raises(DraftConfigError, match=r"choose from 1\.\.7"):
        Space.of(model, find_adapter(model), fewest, most)
