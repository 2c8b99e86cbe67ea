"""What several candidates for one place are worth, beside enumeration."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.exact import Chain, committed
from helpers.optimum import candidates_of
from helpers.optimum import optimum as enumerated
from selfspec.accept import TokenLevel
from selfspec.cache.tree import Tree
from selfspec.measure.candidates import COUNTS, candidates_at_one_place, optimum, token_level


def _pair(seed: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = (1.5 * torch.randn(2, 1, vocab, generator=generator, dtype=torch.float64)).softmax(-1)
    return p, q


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(1, 4))
def test_the_optimum_is_the_smallest_cut_over_all_sets(seed: int, vocab: int, count: int) -> None:
    p, q = _pair(seed, vocab)
    count = min(count, vocab)
    expected = enumerated(p[0], candidates_of(q[0], count, replaced=False))
    assert float(optimum(p, q, count)) == pytest.approx(expected, abs=2e-3 if count > 1 else 1e-9)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_token_level_rule_is_counted_over_its_own_draws(count: int) -> None:
    p, q = _pair(3, 5)
    tree = Tree((-1,) * count)
    chain = Chain((p[0], p[0].expand(5, -1)))
    exact = committed(TokenLevel(), chain, candidates_of(q[0], count, replaced=False), tree=tree).length
    generator = torch.Generator().manual_seed(0)
    found = token_level(p.expand(400, -1), q.expand(400, -1), count, generator)
    assert float(found.mean()) == pytest.approx(exact, abs=0.015)


def test_no_more_is_accepted_than_by_the_best_rule_and_more_candidates_are_worth_more() -> None:
    texts = [
        tuple(torch.cat([_pair(10 * text + place, 12)[which] for place in range(8)]) for which in (0, 1))
        for text in range(4)
    ]
    found = candidates_at_one_place([(p, q) for p, q in texts])
    assert [each.count for each in found] == list(COUNTS)
    values = [(each.accepted.value, each.best.value) for each in found]
    assert values == sorted(values)
    assert all(accepted <= best + 0.02 for accepted, best in values)
    assert found[0].best.value == pytest.approx(sum(float(torch.minimum(p, q).sum()) for p, q in texts) / 32)
