"""Logits become the probabilities plain decoding would draw from, and draws follow their weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from helpers.goodness import p_value
from selfspec.decode.processors import Warping
from selfspec.decode.sampling import Sampling, draw, drawn_by_inversion, drawn_by_race, proper
from selfspec.decode.sequences import Prefixes, Sequences

NOTHING_BEFORE = Prefixes(Sequences(torch.empty(1, 0, dtype=torch.long), pad=0))


def test_greedy_is_one_hot_at_the_first_largest_logit() -> None:
    logits = torch.tensor([[[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]]], dtype=torch.float64)
    expected = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]])
    sampling = Sampling(Warping(LogitsProcessorList()), greedy=True)
    assert torch.equal(sampling.probabilities(sampling.scores(logits, NOTHING_BEFORE)), expected)


def test_every_position_of_a_block_is_warped_as_if_alone() -> None:
    warpers = LogitsProcessorList(
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(7), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)]
    )
    logits = torch.randn(3, 4, 20, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(Warping(warpers), greedy=False)
    block = sampling.probabilities(sampling.scores(logits, NOTHING_BEFORE))
    for row in range(3):
        for position in range(4):
            alone = warpers(torch.empty(1, 0, dtype=torch.long), logits[row, position][None]).softmax(-1)[0]
            torch.testing.assert_close(block[row, position], alone)
    assert (block == 0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_probabilities_are_those_of_float32_logits_whatever_their_dtype(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    sampling = Sampling(Warping(LogitsProcessorList()), greedy=False)
    found = sampling.probabilities(sampling.scores(logits, NOTHING_BEFORE))
    torch.testing.assert_close(found, logits.float().softmax(-1), rtol=1e-6, atol=0.0)


Draws = Callable[[Tensor, torch.Generator], Tensor]
WAYS: dict[str, Draws] = {"whichever": draw, "inversion": drawn_by_inversion, "race": drawn_by_race}


@pytest.fixture(params=WAYS)
def draws(request: pytest.FixtureRequest) -> Draws:
    return WAYS[request.param]


def test_draws_follow_weights_that_are_not_normalised(draws: Draws) -> None:
    weights = torch.tensor([5.0, 0.0, 1.0, 2.0, 1e-3]).expand(20_000, 5)
    drawn = draws(weights, torch.Generator().manual_seed(0))
    joint: dict[tuple[int, ...], float] = {
        (token,): float(weight / weights[0].sum()) for token, weight in enumerate(weights[0])
    }
    assert p_value([(int(token),) for token in drawn], joint) > 0.01


@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_single_possible_token_is_always_drawn(draws: Draws, place: int) -> None:
    weights = torch.zeros(1000, 7).index_fill(1, torch.tensor([place]), 1e-30)
    assert (draws(weights, torch.Generator().manual_seed(0)) == place).all()


def test_draws_do_not_depend_on_each_other(draws: Draws) -> None:
    drawn = draws(torch.ones(20_000, 2, 3), torch.Generator().manual_seed(0))
    joint: dict[tuple[int, ...], float] = {(a, b): 1 / 9 for a in range(3) for b in range(3)}
    assert p_value([tuple(pair) for pair in drawn.tolist()], joint) > 0.01


def test_tokens_of_tiny_weight_are_drawn_no_more_than_they_weigh(
    draws: Draws,
) -> None:
    # Together they weigh one in a million: uniform numbers of 24 bits would draw some of them in a few thousand draws.
    weights = torch.full((2000, 20_000), 5e-11)
    weights[:, 7777] = 1.0
    assert (draws(weights, torch.Generator().manual_seed(0)) == 7777).all()


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_uniform_numbers_draw_what_can_be_drawn(
    monkeypatch: pytest.MonkeyPatch, uniform: float
) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.full(shape, uniform, dtype=options["dtype"]))
    weights = torch.tensor([[0.0, 0.1, 0.0, 0.3, 0.0], [0.0, 3e-45, 1e-40, 0.0, 0.0]])
    wanted = [1, 1] if uniform == 0.0 else [3, 2]
    assert drawn_by_inversion(weights, torch.Generator()).tolist() == wanted


def test_what_cannot_be_drawn_from_gives_some_token(draws: Draws) -> None:
    weights = torch.stack([torch.zeros(5), torch.full((5,), torch.nan)])
    assert all(0 <= token < 5 for token in draws(weights, torch.Generator().manual_seed(0)).tolist())


def test_a_draft_distribution_that_is_not_finite_becomes_uniform() -> None:
    q = torch.tensor([[0.5, 0.5, 0.0], [float("nan"), 0.5, 0.5], [float("inf"), 0.0, 0.0]])
    mended = proper(q)
    assert torch.equal(mended[0], q[0])
    torch.testing.assert_close(mended[1:], torch.full((2, 3), 1 / 3))
