"""Lenience accepts more, and gives no token more than p / l: shown in closed form, over chains and trees."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.exact import Case, cases, committed, conditionals, tree_cases
from selfspec.accept import TokenLevel, find_rule
from selfspec.accept.lenient import Lenience
from selfspec.errors import UnsupportedOptionError


@pytest.mark.parametrize("kind", [cases(), tree_cases()], ids=["chains", "trees"])
@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.data(), st.floats(0.05, 1))
def test_no_token_gets_more_than_its_share_by_the_lenience(
    kind: st.SearchStrategy[Case], data: st.DataObject, lenience: float
) -> None:
    case = data.draw(kind)
    result = committed(Lenience(lenience), case.p, case.q, tree=case.tree)
    if case.tree.is_chain:
        assert result.length >= committed(TokenLevel(), case.p, case.q).length - case.tolerance
    # Texts of one token, of two, and so on.
    texts = [result.joint]
    while texts[0].dim():
        texts.insert(0, texts[0].sum(-1))
    for (before, text), p in zip(pairwise(texts), case.p.tables, strict=True):
        assert (text <= before[..., None] * p / lenience + case.tolerance).all()
        above = (text - before[..., None] * p).clamp(min=0).sum(-1)
        assert (above <= (1 - lenience) * before + 9 * case.tolerance).all()


def test_it_is_lenient_by_its_argument_and_the_token_level_rule_at_1() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (conditionals(3, range(1, length + 1), generator) for length in (3, 2))
    joints = [committed(find_rule(f"relaxed-lenience:lenience={lenience}"), p, q).joint for lenience in (1, 0.8, 0.2)]
    distances = [float((joint - p.joint()).abs().sum()) for joint in joints]
    assert distances[0] < 1e-12 < 1e-3 < distances[1] < distances[2]


@pytest.mark.parametrize("lenience", [0, -0.5, 1.5, float("nan"), "1", True, None])
def test_another_number_is_refused(lenience: float) -> None:
    with pytest.raises(UnsupportedOptionError, match="lenience is above 0 and at most 1"):
        Lenience(lenience)
