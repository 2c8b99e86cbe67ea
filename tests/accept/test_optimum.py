"""The best that any rule could do for several candidates at one place, and how near to it recursive rejection comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor

from helpers.exact import Chain, all_drafts, committed, without
from selfspec.accept import Block, Rule, TokenLevel
from selfspec.cache.tree import Tree


def candidates_of(q: Tensor, count: int, replaced: bool) -> Chain:
    """What siblings are drawn from, each given those before it."""
    tables = []
    for node in range(count):
        before = all_drafts(len(q), node)
        left = q.expand(len(before), -1) if replaced else without(q.expand(len(before), -1), before)
        tables.append(left.reshape([len(q)] * (node + 1)))
    return Chain(tuple(tables))


def optimum(p: Tensor, candidates: Chain) -> float:
    """The largest chance that the token drawn from p is among the candidates, over all couplings of the two.

    As a linear program: how much of each set of candidates goes to each of its tokens (Sun et al., 2023, arXiv
    2310.15141; Khisti et al., 2024, arXiv 2410.18234).
    """
    chances, drawn = candidates.joint().flatten().numpy(), all_drafts(len(p), len(candidates.tables)).tolist()
    ways = [(row, token) for row, tokens in enumerate(drawn) for token in set(tokens)]
    rows, tokens = np.zeros((len(drawn), len(ways))), np.zeros((len(p), len(ways)))
    for way, (row, token) in enumerate(ways):
        rows[row, way] = tokens[token, way] = 1
    bounds = np.concatenate([chances, p.numpy()])
    found: Any = linprog(-np.ones(len(ways)), A_ub=np.concatenate([rows, tokens]), b_ub=bounds)
    return float(-found.fun)


def _distributions(seed: int, vocab: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = (1.5 * torch.randn(2, vocab, generator=generator, dtype=torch.float64)).softmax(-1)
    return p, q


def _accepted(rule: Rule, p: Tensor, candidates: Chain) -> float:
    tree = Tree((-1,) * len(candidates.tables))
    return committed(rule, Chain((p, p.expand(len(p), -1))), candidates, tree=tree).length


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(1, 3), st.booleans())
def test_no_rule_accepts_more_than_the_optimum_and_of_one_candidate_both_reach_it(
    seed: int, vocab: int, count: int, replaced: bool
) -> None:
    p, q = _distributions(seed, vocab)
    candidates = candidates_of(q, count, replaced)
    best = optimum(p, candidates)
    for rule in (TokenLevel(), Block()):
        found = _accepted(rule, p, candidates)
        assert found <= best + 1e-8
        if count == 1:
            assert found == pytest.approx(best, abs=1e-8)
            assert best == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-8)


def test_recursive_rejection_without_replacement_comes_near_the_optimum() -> None:
    shares = []
    for seed in range(60):
        p, q = _distributions(seed, 5)
        with_, without_ = (candidates_of(q, 2, replaced) for replaced in (True, False))
        found, best = _accepted(TokenLevel(), p, without_), optimum(p, without_)
        # Two different candidates are worth more than two that may be one, to any rule.
        assert best >= optimum(p, with_) - 1e-8
        shares.append(found / best)
    assert 0.93 < sum(shares) / len(shares) < 0.95
    assert min(shares) > 0.8
