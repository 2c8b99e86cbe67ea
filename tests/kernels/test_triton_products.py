"""Products in Triton equal the products with the rounded weights on a device, and run where ATen's do not."""

from __future__ import annotations

import pytest
import torch

from helpers.triton_products import OFF_BY, ROWS, check
from selfspec.formats import int4, int8, rounding
from selfspec.formats.int4 import Int4, Int4Linear
from selfspec.formats.int8 import Int8, Int8Linear
from selfspec.formats.rounding import Kernels

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

    rounded = Int4(group).pack(torch.randn(24, 640).to(cuda))
    states = torch.randn(2, 640, device=cuda)
    found = low_bits_product(states, rounded["factors"], rounded["levels"], rounded["scales"], rounded["zeros"])
    expected = (states.double() * rounded["factors"].double()) @ values(rounded).T
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.05)


def test_sizes_that_atens_kernel_for_four_bits_does_not_take_are_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (int4, int8, rounding):
        monkeypatch.setattr(module, "kernels_of", lambda _: Kernels.TRITON)
    large, small = (Int4().pack(torch.randn(16, inputs)) for inputs in (256, 576))
    assert Int4Linear(small, None, torch.float32).kernels is Kernels.TRITON
    assert Int4Linear(large, None, torch.float32).kernels is Kernels.ATEN
    odd = Int8().pack(torch.randn(16, 40))
    assert Int8Linear(odd, None, torch.float32).kernels is Kernels.TRITON
