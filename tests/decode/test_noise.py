"""Noise by counter: uniform, independent of all that differs, the same wherever a row runs; and coupled decoding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, kstest
from torch import Tensor

from helpers.joints import holm_rejects, p_value
from selfspec.decode.noise import Noise, Purpose, drawn, drawn_by_blocks, drawn_by_inversion, drawn_by_race, race_noise

CPU = torch.device("cpu")
SEEDS, ROUNDS, ROWS, PLACES = 40, 12, 6, 16


def pairs(first: Tensor, second: Tensor) -> float:
    """How well pairs of numbers fit independent ones that are uniform: a p-value, over cells of an eighth each way."""
    cells: dict[tuple[int, ...], float] = {(a, b): 1 / 64 for a in range(8) for b in range(8)}
    both = torch.stack([(8 * first).long().flatten(), (8 * second).long().flatten()], 1)
    return p_value([tuple(pair) for pair in both.tolist()], cells)


@pytest.fixture(scope="module")
def numbers() -> Tensor:
    """Of each seed, round, purpose, row and place."""
    table = torch.empty(SEEDS, ROUNDS, len(Purpose), ROWS, PLACES, dtype=torch.float64)
    for seed in range(SEEDS):
        noise = Noise(seed, range(ROWS), CPU)
        for round_ in range(ROUNDS):
            noise.begin_round()
            for purpose in Purpose:
                table[seed, round_, purpose] = noise.uniform(purpose, 0, PLACES)
    return table


def test_numbers_are_uniform(numbers: Tensor) -> None:
    found = {purpose.name: float(kstest(numbers[:, :, purpose].flatten(), "uniform").pvalue) for purpose in Purpose}
    # The bits of a number too, from the highest to the lowest.
    for bit in range(1, 53):
        ones = int(((numbers * 2.0**bit).long() & 1).sum())
        found[f"bit {bit}"] = float(binomtest(ones, numbers.numel()).pvalue)
    assert holm_rejects(found, 0.01) == []


@pytest.mark.parametrize("axis", range(5), ids=["seeds", "rounds", "purposes", "rows", "places"])
@pytest.mark.parametrize("apart", [1, 2])
def test_numbers_are_independent_along_each_axis(numbers: Tensor, axis: int, apart: int) -> None:
    size = numbers.shape[axis] - apart
    assert pairs(numbers.narrow(axis, 0, size), numbers.narrow(axis, apart, size)) > 0.01


def test_no_number_comes_twice(numbers: Tensor) -> None:
    assert len(numbers.unique()) == numbers.numel()


def by_lots(noise: Noise, weights: Tensor, purpose: Purpose, first: int = 0) -> Tensor:
    return drawn(weights, noise.lots(purpose, first, *weights.shape[1:]))


@pytest.mark.parametrize("running", [[0], [3], [0, 4], [1, 2, 3, 4]], ids=str)
def test_a_row_has_the_same_noise_whatever_rows_are_beside_it(running: list[int]) -> None:
    whole, alone = Noise(7, range(5), CPU), Noise(7, running, CPU)
    weights = torch.rand(5, 3, 40, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        whole.begin_round()
        alone.begin_round()
        for purpose in Purpose:
            assert torch.equal(whole.uniform(purpose, 2, 9)[running], alone.uniform(purpose, 2, 9))
            assert torch.equal(by_lots(whole, weights, purpose)[running], by_lots(alone, weights[running], purpose))
    left = whole.narrowed(running)
    for purpose in Purpose:
        assert torch.equal(left.uniform(purpose, 0, 4), alone.uniform(purpose, 0, 4))
    assert torch.equal(
        left.choose(weights[running], torch.arange(3)[None]), whole.choose(weights, torch.arange(3)[None])[running]
    )
    left.begin_round()
    alone.begin_round()
    assert torch.equal(left.uniform(Purpose.DRAFT, 0, 40), alone.uniform(Purpose.DRAFT, 0, 40))


@pytest.mark.parametrize("vocab", [40, 20_000])
def test_a_place_has_the_same_noise_alone_and_in_a_block(vocab: int) -> None:
    noise, weights = Noise(1, range(3), CPU), torch.rand(3, 20, vocab, generator=torch.Generator().manual_seed(0))
    block = by_lots(noise, weights, Purpose.DRAFT)
    for place in range(20):
        alone = by_lots(noise, weights[:, place : place + 1], Purpose.DRAFT, place)
        assert torch.equal(alone, block[:, place : place + 1])


def by_inversion(weights: Tensor, seed: int) -> Tensor:
    return by_lots(Noise(seed, range(weights.shape[0]), CPU), weights, Purpose.RECOVER)


def by_race(weights: Tensor, seed: int) -> Tensor:
    rows, places, _ = weights.shape
    seeds = torch.arange(seed, seed + rows * places).reshape(rows, places).numpy()
    return drawn_by_race(weights, race_noise(torch.empty_like(weights), seeds, torch.Generator()))


def by_choice(weights: Tensor, seed: int) -> Tensor:
    return Noise(seed, range(weights.shape[0]), CPU).choose(weights, torch.arange(weights.shape[1])[None])


Draws = Callable[[Tensor, int], Tensor]


@pytest.fixture(params=[by_inversion, by_race, by_choice])
def draws(request: pytest.FixtureRequest) -> Draws:
    made: Draws = request.param
    return made


def placed(weights: Tensor, vocab: int) -> Tensor:
    """Weights of a few tokens, spread over a vocabulary, the last of them at its end."""
    tokens = torch.linspace(0, vocab - 1, weights.shape[-1]).long()
    return torch.zeros(*weights.shape[:-1], vocab).index_copy(-1, tokens, weights)


def test_draws_follow_weights_that_are_not_normalised(draws: Draws) -> None:
    weights, found = torch.tensor([5.0, 0.0, 1.0, 2.0, 1e-3]), {}
    # Tokens of a small vocabulary, of a large one up to its ends, and of one block and its neighbours.
    for tokens, vocab in (([0, 1, 2, 3, 4], 5), ([0, 2048, 4096, 6144, 8192], 8193), ([255, 256, 300, 511, 512], 9000)):
        whole = torch.zeros(vocab).index_copy(0, torch.tensor(tokens), weights)
        # Few at once, which stay in the processor's cache.
        drawn = torch.cat([draws(whole.expand(5, 8, vocab), 50 * seed) for seed in range(200)])
        joint: dict[tuple[int, ...], float] = {
            (token,): float(weight / weights.sum()) for token, weight in zip(tokens, weights, strict=True)
        }
        found[str(tokens)] = p_value([(token,) for token in drawn.flatten().tolist()], joint)
    assert holm_rejects(found, 0.01) == [], found


@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("vocab", [7, 8199])
def test_a_single_possible_token_is_always_drawn(draws: Draws, place: int, vocab: int) -> None:
    weights = placed(torch.zeros(50, 4, 7).index_fill(-1, torch.tensor([place]), 1e-30), vocab)
    token = int(torch.linspace(0, vocab - 1, 7).long()[place])
    assert (draws(weights, 0) == token).all()


def test_draws_do_not_depend_on_each_other(draws: Draws) -> None:
    drawn = draws(torch.ones(2000, 8, 3), 0).unflatten(1, (4, 2)).flatten(0, 1)
    joint: dict[tuple[int, ...], float] = {(a, b): 1 / 9 for a in range(3) for b in range(3)}
    assert p_value([tuple(pair) for pair in drawn.tolist()], joint) > 0.01


def test_tokens_of_tiny_weight_are_drawn_no_more_than_they_weigh(draws: Draws) -> None:
    # Together they weigh one in a million: uniform numbers of 24 bits would draw some of them in a few thousand draws.
    weights = torch.full((5, 4, 20_000), 5e-11)
    weights[..., 7777] = 1.0
    assert all((draws(weights, 50 * seed) == 7777).all() for seed in range(100))


@pytest.mark.parametrize(("by", "count", "vocab"), [(drawn_by_inversion, 1, 5), (drawn_by_blocks, 2, 8193)])
@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-52])
def test_the_ends_of_the_uniform_numbers_draw_what_can_be_drawn(
    by: Callable[..., Tensor], count: int, vocab: int, uniform: float
) -> None:
    weights = torch.tensor([[[0.0, 0.1, 0.0, 0.3, 0.0]], [[0.0, 3e-45, 1e-40, 0.0, 0.0]]])
    numbers = torch.full((2, 1), uniform, dtype=torch.float64)
    drawn = by(placed(weights, vocab), *[numbers] * count)
    tokens = torch.linspace(0, vocab - 1, 5).long()
    assert torch.equal(drawn[:, 0], tokens[[1, 1] if uniform == 0.0 else [3, 2]])


@pytest.mark.parametrize("vocab", [5, 8193])
def test_what_cannot_be_drawn_from_gives_some_token(draws: Draws, vocab: int) -> None:
    weights = torch.stack([torch.zeros(vocab), torch.full((vocab,), torch.nan)])[:, None]
    assert all(0 <= token < vocab for token in draws(weights, 0).flatten().tolist())


@pytest.mark.parametrize(("times", "turned"), [(0.999, False), (1.001, True)])
def test_exponentials_say_how_much_more_a_token_would_need_to_be_chosen(times: float, turned: bool) -> None:
    noise, positions = Noise(5, range(4), CPU), torch.arange(30)[None]
    logits = torch.randn(4, 30, 7, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    best = (logits - noise.exponentials(positions, 7).log()).topk(2, -1)
    gap, other = best.values[..., :1] - best.values[..., 1:], best.indices[..., 1:]
    raised = logits.scatter_add(-1, other, times * gap)
    chosen = noise.choose(raised.exp(), positions)
    assert torch.equal(chosen, best.indices[..., 1 if turned else 0])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(2, 20), st.integers(0, 2**32))
def test_alike_distributions_choose_alike_as_often_as_is_known(vocab: int, seed: int) -> None:
    p, q = torch.rand(2, vocab, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    positions = torch.arange(4000)[None]
    noise = Noise(seed, [0], CPU)
    same = noise.choose(p.expand(1, 4000, -1), positions) == noise.choose(q.expand(1, 4000, -1), positions)
    variation = 0.5 * float((p - q).abs().sum())
    rate = float(same.double().mean())
    assert (1 - variation) / (1 + variation) - 0.04 <= rate <= 1 - variation + 0.04
