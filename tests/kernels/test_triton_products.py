"""Products in Triton equal the products with the rounded weights on a device, and run where ATen's do not."""

from __future__ import annotations

import pytest
import torch

from helpers.triton_products import OFF_BY, ROWS, check
from selfspec.kernels import low_bits
from selfspec.kernels.low_bits import EightBitsLinear, FourBitsLinear, Kernels
from selfspec.kernels.rounded import Precision, round_weight

pytest.importorskip("triton")
CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("cuda", [pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize("dtype", OFF_BY, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_device_gives_the_products_of_the_rounded_weights(
    bits: int, rows: int, dtype: torch.dtype, cuda: str
) -> None:
    check(bits, rows, dtype, cuda)


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("cuda", [pytest.param("cuda", marks=CUDA)])
def test_groups_of_other_sizes(group: int, cuda: str) -> None:
    from helpers.triton_products import values
    from selfspec.kernels.triton_products import low_bits_product

    rounded = round_weight(torch.randn(24, 640).to(cuda), Precision(4, group))
    states = torch.randn(2, 640, device=cuda)
    found = low_bits_product(states, rounded.factors, rounded.levels, rounded.scales, rounded.zeros)
    expected = (states.double() * rounded.factors.double()) @ values(rounded).T
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.05)


def test_sizes_that_atens_kernel_for_four_bits_does_not_take_are_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_bits, "kernels_of", lambda _: Kernels.TRITON)
    large, small = (round_weight(torch.randn(16, inputs), Precision(4, 32)) for inputs in (256, 576))
    assert FourBitsLinear(small, None, torch.float32)._kernels is Kernels.TRITON
    assert FourBitsLinear(large, None, torch.float32)._kernels is Kernels.ATEN
    odd = round_weight(torch.randn(16, 40), Precision(8, 32))
    assert EightBitsLinear(odd, None, torch.float32)._kernels is Kernels.TRITON
