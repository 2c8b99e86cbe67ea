"""Weights in groups: products over codes are those over the dense weight that they stand for, to the last bit."""

from __future__ import annotations

import pytest
import torch

from helpers.quantised import dense, words
from helpers.snapshot import kernels
from selfspec.formats.groups import Groups, GroupsLinear
from selfspec.formats.packed import Packed, UnsupportedWeightError
from selfspec.kernels import native

VARIANTS = [pytest.param(each, marks=pytest.mark.kernels) for each in native.variants()] + [None]
SCALES = (torch.bfloat16, torch.float16, torch.float32)


def packed(
    shape: tuple[int, int], bits: int, group: int, symmetric: bool, scale: torch.dtype
) -> tuple[Packed, torch.Tensor]:
    draws = torch.Generator().manual_seed(bits + group)
    outputs, groups = shape[0], shape[1] // group
    codes = torch.randint(0, 1 << bits, shape, generator=draws)
    scales = (torch.rand(outputs, groups, generator=draws) / 8 + 0.01).to(scale)
    zeros = torch.randint(0, 1 << bits, (outputs, groups), generator=draws)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << bits - 1)
    in_words = torch.empty(0, dtype=torch.int32) if symmetric else words(zeros.t(), bits).t().contiguous()
    parts = {"codes": words(codes, bits), "scales": scales, "zeros": in_words}
    return Packed(torch.Size(shape), parts), dense(codes, scales, zeros)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("shape", "group"), [((8, 64), 32), ((40, 576), 64), ((33, 128), 128), ((1, 96), 96), ((5, 32), 16)]
)
def test_products_and_rows_are_those_of_the_dense_weight(
    variant: str | None, bits: int, shape: tuple[int, int], group: int
) -> None:
    for scale, symmetric in (
        (each, kind) for each in SCALES for kind in (True, False) if kind or each != torch.float32
    ):
        held, weight = packed(shape, bits, group, symmetric, scale)
        Groups(bits, group, symmetric, str(scale).removeprefix("torch.")).check(held)
        with kernels(variant or "none"):
            layer, rounded = (GroupsLinear(held, None, dtype) for dtype in (torch.float32, torch.bfloat16))
            assert torch.equal(layer.join(), weight)
            assert torch.equal(rounded.join(), weight.bfloat16())
            some = torch.tensor([[0, shape[0] - 1]])
            assert torch.equal(layer.rows_of(some), weight[some])
            for rows in (1, 2, 3, 7, 11, 27):
                states = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows))
                if variant is None:
                    assert torch.equal(layer.product(states), states @ weight.t())
                else:
                    found = native.few_rows_packed(states, *layer.operands.all, shape[1])
                    assert torch.equal(found, native.few_rows(states, weight, None))


def test_parts_that_kernels_would_read_outside_of_are_refused() -> None:
    held, _ = packed((8, 64), 4, 32, False, torch.bfloat16)
    for part in ("codes", "scales", "zeros"):
        with pytest.raises(UnsupportedWeightError, match=part):
            Groups(4, 32, False).check(Packed(held.shape, {**held.parts, part: held[part][:, :1]}))


@pytest.mark.parametrize(
    "format", [Groups(4, 24), Groups(3, 32), Groups(4, 32, False, "float32"), Groups(4, 128)], ids=str
)
def test_what_has_no_kernel_does_not_fit(format: Groups) -> None:
    assert not format.fits((8, 96))
    with pytest.raises(RuntimeError, match="no kernel"):
        format.empty((8, 96), torch.device("meta"))
