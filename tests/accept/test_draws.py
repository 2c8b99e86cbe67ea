"""Many rounds, really drawn: what the rules commit in practice is what they commit on paper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from helpers.exact import Chain
from helpers.joints import p_value
from selfspec.accept import Block, Rule, TokenLevel
from selfspec.decode.noise import Noise, Purpose
from selfspec.draft import Draft

VOCAB, DRAFTED, ROUNDS = 4, 3, 20_000


def chain(length: int, seed: int) -> Chain:
    generator = torch.Generator().manual_seed(seed)
    shapes = ([VOCAB] * (i + 1) for i in range(length))
    return Chain(tuple((1.5 * torch.randn(shape, generator=generator)).softmax(-1) for shape in shapes))


def drawn(model: Chain, noise: Noise) -> Tensor:
    tokens = torch.empty(ROUNDS, 0, dtype=torch.long)
    for place, table in enumerate(model.tables):
        p = table[tuple(tokens.T)].expand(ROUNDS, -1)
        tokens = torch.cat([tokens, noise.draw(p[:, None], Purpose.DRAFT, place)], 1)
    return tokens


def committed(rule: Rule, p: Chain, q: Chain, seed: int) -> Iterator[tuple[int, ...]]:
    """`DRAFTED + 1` tokens of every round, what it did not commit itself drawn from p."""
    noise = Noise(seed, range(ROUNDS), torch.device("cpu"))
    drafts = drawn(q, noise)
    p_rows, q_rows = p.along(drafts), q.along(drafts)
    draft = Draft.chain(drafts, q_rows)
    mask = noise.uniform(Purpose.ACCEPT, 0, DRAFTED) < rule.accept_probs(draft, p_rows, p_rows.log())
    count = rule.accepted(mask, draft.tree)
    token = noise.draw(rule.recovery_probs(draft, p_rows, count)[:, None], Purpose.RECOVER)
    noise.begin_round()
    for stood in range(DRAFTED + 1):
        rows = (count == stood).nonzero()[:, 0]
        tokens, rest = torch.cat([drafts[rows, :stood], token[rows]], 1), noise.narrowed(rows.tolist())
        for place, table in enumerate(p.tables[stood + 1 :]):
            tokens = torch.cat([tokens, rest.draw(table[tuple(tokens.T)][:, None], Purpose.DRAFT, place)], 1)
        yield from map(tuple, tokens.tolist())


def fit(rule: Rule, repeats: int, seed: int) -> float:
    p, q = chain(DRAFTED + 1, seed), chain(DRAFTED, seed + 1)
    joint = p.joint()
    outcomes = {tuple(index): float(joint[tuple(index)]) for index in torch.ones_like(joint).nonzero().tolist()}
    return p_value((text for repeat in range(repeats) for text in committed(rule, p, q, 100 * seed + repeat)), outcomes)


@pytest.mark.parametrize("rule", [TokenLevel(), Block()], ids=str)
@pytest.mark.parametrize(
    ("repeats", "seed", "level"),
    [(1, 0, 0.005), *(pytest.param(10, seed, 0.001, marks=pytest.mark.statistical) for seed in range(5))],
)
def test_rounds_commit_what_they_do_on_paper(rule: Rule, repeats: int, seed: int, level: float) -> None:
    assert fit(rule, repeats, seed) > level
