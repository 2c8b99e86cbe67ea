"""Many rounds, really drawn: what the rules commit in practice is what they commit on paper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from helpers.exact import Chain
from helpers.goodness import p_value
from selfspec.accept import Block, Rule, TokenLevel
from selfspec.decode.sampling import draw
from selfspec.draft import Draft

VOCAB, DRAFTED = 4, 3


def chain(length: int, seed: int) -> Chain:
    generator = torch.Generator().manual_seed(seed)
    shapes = ([VOCAB] * (i + 1) for i in range(length))
    return Chain(tuple((1.5 * torch.randn(shape, generator=generator)).softmax(-1) for shape in shapes))


def drawn(model: Chain, rounds: int, length: int, generator: torch.Generator) -> Tensor:
    tokens = torch.empty(rounds, 0, dtype=torch.long)
    for table in model.tables[:length]:
        p = table[tuple(tokens.T)].expand(rounds, -1)
        tokens = torch.cat([tokens, draw(p, generator)[:, None]], 1)
    return tokens


def committed(rule: Rule, p: Chain, q: Chain, rounds: int, seed: int) -> Iterator[tuple[int, ...]]:
    """`DRAFTED + 1` tokens of every round, what it did not commit itself drawn from p."""
    generator = torch.Generator().manual_seed(seed)
    drafts = drawn(q, rounds, DRAFTED, generator)
    p_rows, q_rows = p.along(drafts), q.along(drafts)
    draft = Draft.chain(drafts, q_rows)
    mask = torch.rand(drafts.shape, generator=generator) < rule.accept_probs(draft, p_rows, p_rows.log())
    count = rule.accepted(mask, draft.tree)
    token = draw(rule.recovery_probs(draft, p_rows, count), generator)
    for stood in range(DRAFTED + 1):
        rows = count == stood
        tokens = torch.cat([drafts[rows, :stood], token[rows, None]], 1)
        for table in p.tables[stood + 1 :]:
            tokens = torch.cat([tokens, draw(table[tuple(tokens.T)], generator)[:, None]], 1)
        yield from map(tuple, tokens.tolist())


def fit(rule: Rule, rounds: int, seed: int) -> float:
    p, q = chain(DRAFTED + 1, seed), chain(DRAFTED, seed + 1)
    joint = p.joint()
    outcomes = {tuple(index): float(joint[tuple(index)]) for index in torch.ones_like(joint).nonzero().tolist()}
    return p_value(committed(rule, p, q, rounds, seed), outcomes)


@pytest.mark.parametrize("rule", [TokenLevel(), Block()], ids=str)
def test_twenty_thousand_rounds(rule: Rule) -> None:
    assert fit(rule, 20_000, seed=0) > 0.005


@pytest.mark.statistical
@pytest.mark.parametrize("rule", [TokenLevel(), Block()], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_two_hundred_thousand_rounds(rule: Rule, seed: int) -> None:
    assert fit(rule, 200_000, seed) > 0.001
