"""The best that any rule could do for several candidates at one place, by enumeration."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from helpers.chains import without
from helpers.exact import Chain, all_drafts


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

    It is the flow from sets of candidates to the tokens in them. By its smallest cut that is the least of p(A) + 1 -
    P(all candidates lie in A), over all sets A of tokens (Sun et al., 2023, arXiv 2310.15141; Khisti et al., 2024,
    arXiv 2410.18234).
    """
    chances, drawn = candidates.joint().flatten(), all_drafts(len(p), len(candidates.tables))
    cuts = []
    for inside in itertools.product([False, True], repeat=len(p)):
        chosen = torch.tensor(inside)
        cuts.append(p[chosen].sum() + 1 - chances[chosen[drawn].all(-1)].sum())
    return float(torch.stack(cuts).min())
