"""Weights in planes: no bit of bfloat16 is lost, and products over them are those over the dense weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.reference import every_number, few_octaves
from selfspec.formats.packed import Packed, UnsupportedWeightError
from selfspec.formats.planes import Planes, PlanesLinear, Upper, UpperLinear
from selfspec.kernels import native
from selfspec.kernels.crossover import crossover

ROWS = (*range(1, 14), 27, 64, 130)


pytestmark = pytest.mark.usefixtures("variant")


def bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.contiguous().view(torch.int16)


def layer(weight: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> PlanesLinear:
    return PlanesLinear(Planes().pack(weight), None, dtype)


@pytest.mark.parametrize("scattered", [False, True])
def test_every_number_comes_back(variant: str | None, scattered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.formats.planes._MOST_ESCAPES", 1.0)
    numbers = every_number(torch.bfloat16)
    if scattered:
        numbers = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))]
    weight = numbers.view(-1, 128)
    packed = layer(weight)
    assert torch.equal(bits(packed.join()), bits(weight))
    some = torch.tensor([[3, 0], [511, 3]])
    assert torch.equal(bits(packed.rows_of(some)), bits(weight[some]))


@given(st.integers(1, 9), st.integers(1, 200), st.integers(0, 1 << 20))
@settings(deadline=None)
def test_any_size_comes_back(outputs: int, inputs: int, seed: int) -> None:
    weight = few_octaves(outputs, inputs, seed)
    for each in (weight, weight.float(), weight.double()):
        packed = layer(each, each.dtype)
        assert torch.equal(packed.join(), each)


def of_dense(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product by the kernel, or by torch, as the number of rows decides for a dense weight."""
    most = crossover().rows(states.dtype, weight.shape[1]) if native.available() else 0
    if len(states) <= most:
        return native.few_rows(states, weight, None)
    return torch.nn.functional.linear(states, weight.to(states.dtype))


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 37), (33, 128), (40, 576), (5, 200)])
def test_products_are_those_of_the_dense_weight(variant: str | None, outputs: int, inputs: int) -> None:
    weight = few_octaves(outputs, inputs)
    packed = layer(weight, torch.float32)
    for rows in ROWS:
        states = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
        assert torch.equal(packed.product(states), of_dense(states, weight))


def test_weights_that_share_memory_leave_products_and_gradients_alone(variant: str | None) -> None:
    weights = [few_octaves(outputs, 200, seed) for seed, outputs in enumerate((40, 7, 90, 40))]
    packed = [layer(weight, torch.float32) for weight in weights]
    states = torch.randn(130, 200, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = [each.product(states) for each in packed]
    for product, weight in zip(found, weights, strict=True):
        assert torch.equal(product, of_dense(states, weight))
    # Few rows, which kernels multiply where nothing is trained, have gradients as many have.
    for some in (states, states[:2].clone()):
        some.requires_grad_()
        product = packed[0].product(some)
        with torch.no_grad():
            packed[3].product(some)
        product.sum().backward()
        assert some.grad is not None
        assert torch.allclose(some.grad, weights[0].float().sum(0).expand_as(some), atol=1e-5)


def test_products_of_prompts_in_panels_are_those_of_the_whole_weight(variant: str | None) -> None:
    weight = few_octaves(500, 576)
    states = torch.randn(33, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(layer(weight).product(states), of_dense(states, weight))


def test_weights_that_are_not_finite_stay_so(variant: str | None) -> None:
    weight = few_octaves(4, 64)
    weight[1, 5], weight[2, 63], weight[3, 0] = torch.inf, -torch.inf, torch.nan
    found = layer(weight, torch.float32).product(torch.ones(1, 64))[0]
    assert found[0].isfinite()
    assert found[1:3].tolist() == [torch.inf, -torch.inf]
    assert found[3].isnan()


@pytest.mark.parametrize(("outputs", "inputs"), [(3, 37), (40, 576)])
def test_the_upper_plane_is_a_model_of_its_own(outputs: int, inputs: int) -> None:
    weight = few_octaves(outputs, inputs)
    packed = layer(weight)
    upper = UpperLinear(Upper().pack(packed.weight), None, torch.float32)
    assert upper.upper.data_ptr() == packed.upper.data_ptr()
    for rows in ROWS:
        states = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(upper.product(states), states @ upper.join().t(), rtol=1e-4, atol=1e-4)
    # 3 bits of a mantissa, rounded to the middle: a sixteenth of a weight within the octaves of its row.
    kept = weight.float().abs() > weight.float().abs().amax(1, keepdim=True) * 2.0**-14
    error = (upper.join() - weight.float()).abs() / weight.float().abs()
    assert error[kept].max() <= 1 / 16


def test_bits_of_a_weight_are_those_that_it_takes() -> None:
    weight = few_octaves(64, 576)
    escapes = int((weight.float().abs() < 2.0**-20).logical_and(weight != 0).sum())
    assert Planes().pack(weight).nbytes <= weight.numel() * 1.5 + 64 * 8 + escapes * 8
    assert Planes().nbytes(weight.shape) == weight.numel() * 1.5 + 64 * 8


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.full((2, 64), 0.1), "more bits than bfloat16"),
        (torch.full((2, 64), 0.1, dtype=torch.float64), "float64"),
        (torch.ones(2, 64, dtype=torch.float16), "float16"),
        (2.0 ** -torch.arange(128.0).view(1, 128).bfloat16(), "octaves"),
    ],
)
def test_what_takes_more_bits_is_refused(weight: torch.Tensor, words: str) -> None:
    with pytest.raises(UnsupportedWeightError, match=words):
        Planes().pack(weight)


def test_a_dense_weight_has_no_upper_plane() -> None:
    weight = few_octaves(2, 64)
    assert not Upper().takes(weight)
    with pytest.raises(RuntimeError, match="no upper plane"):
        Upper().pack(weight)
    assert isinstance(Upper().pack(layer(weight).weight), Packed)
