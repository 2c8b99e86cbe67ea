"""Weights in groups: products over codes are those over the dense weight that they stand for, to the last bit."""

from __future__ import annotations

import json

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from helpers.quantised import dense, normal_float4, nvfp4, words
from helpers.snapshot import kernels
from selfspec.formats.coded import Coded, CodedLinear, Float8, Groups, GroupsLinear, MxFp4, NormalFloat4, NvFp4
from selfspec.formats.packed import KernelLinear, Packed, PackedWeight, UnsupportedWeightError
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


def check_is(layer: KernelLinear, rounded: KernelLinear, weight: torch.Tensor, variant: str | None) -> None:
    """A layer, also one of bfloat16, multiplies by a dense weight, and gives its rows."""
    with kernels(variant or "none"):
        assert torch.equal(layer.join(), weight)
        assert torch.equal(rounded.join(), weight.bfloat16())
        some = torch.tensor([[0, layer.out_features - 1]])
        assert torch.equal(layer.rows_of(some), weight[some])
        for rows in (1, 2, 3, 7, 11, 27):
            states = torch.randn(rows, layer.in_features, generator=torch.Generator().manual_seed(rows))
            if variant is None:
                assert torch.equal(layer.product(states), states @ weight.t())
            else:
                found = native.few_rows_packed(states, layer.operands)
                assert torch.equal(found, native.few_rows(states, weight, None))


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
        layer, rounded = (GroupsLinear(held, None, dtype) for dtype in (torch.float32, torch.bfloat16))
        check_is(layer, rounded, weight, variant)


def coded(parameter: torch.nn.Parameter) -> CodedLinear:
    assert isinstance(parameter, PackedWeight)
    assert isinstance(parameter.layer, CodedLinear)
    return parameter.layer


def check_coded(format: Coded, held: Packed, weight: torch.Tensor, variant: str | None) -> None:
    format.check(held)
    layer, rounded = (coded(format.parameter(held, dtype)) for dtype in (torch.float32, torch.bfloat16))
    check_is(layer, rounded, weight, variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("blocks", "size"), [((2, 3), 32), ((3, 6), 16), ((1, 1), 40), ((40, 1), 1)])
@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.uint8])
def test_floats_of_8_bits_are_numbers_of_torch(
    variant: str | None, blocks: tuple[int, int], size: int, scale: torch.dtype
) -> None:
    draws = torch.Generator().manual_seed(0)
    codes = torch.arange(40 * 96).remainder(255).view(40, 96).byte()
    codes[codes == 127] = 126
    scales = torch.rand(blocks, generator=draws) * 0.1 + 0.01
    scales = (scales * 1270).byte() if scale == torch.uint8 else scales.to(scale)
    factors = scales.view(torch.float8_e8m0fnu) if scale == torch.uint8 else scales
    spread = factors.float().repeat_interleave(size, 0)[:40].repeat_interleave(96 // blocks[1], 1)
    weight = codes.view(torch.float8_e4m3fn).float() * spread
    format = Float8(96 // blocks[1], size, str(scale).removeprefix("torch."))
    check_coded(format, Packed(torch.Size((40, 96)), {"codes": codes, "scales": scales}), weight, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_no_number_in_8_bits_is_none(variant: str | None) -> None:
    codes = torch.zeros(2, 16, dtype=torch.uint8)
    codes[0, 1], codes[1, 2] = 127, 255
    parts = {"codes": codes, "scales": torch.ones(1, 1)}
    with kernels(variant or "none"):
        found = coded(Float8(16, 2).parameter(Packed(torch.Size((2, 16)), parts), torch.float32)).join()
    assert found.isnan().nonzero().tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_codes_of_4_bits_are_numbers_of_their_table(variant: str | None) -> None:
    draws = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (40, 96), dtype=torch.uint8, generator=draws)
    exponents = torch.arange(40 * 6).view(40, 6).byte()
    held = Packed(torch.Size((40, 192)), {"codes": codes, "scales": exponents})
    found = (
        convert_moe_packed_tensors(codes.view(1, 40, 6, 16), exponents[None], dtype=torch.float32)[0].t().contiguous()
    )
    check_coded(MxFp4(), held, found, variant)
    for rounded in (True, False):
        made = normal_float4(torch.randn(40, 192, generator=draws), rounded)
        names = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_quant_map", "weight.nested_absmax")
        found_parts = [made.parts.get(name, torch.empty(0)) for name in names]
        parts = dict(zip(NormalFloat4.parts, found_parts, strict=True))
        parts |= {"codes": parts["codes"].view(40, 96), "scales": parts["scales"].view(40, 12)}
        state = json.loads(bytes(made.parts["weight.quant_state.bitsandbytes__nf4"].tolist()))
        format = NormalFloat4(16, rounded, state.get("nested_offset", 0.0))
        check_coded(format, Packed(torch.Size((40, 192)), parts), made.dense, variant)
    made = nvfp4(torch.randn(40, 192, generator=draws))
    scales = made.parts["weight_scale"].view(torch.uint8)
    parts = {"codes": made.parts["weight_packed"], "scales": scales, "divisor": made.parts["weight_global_scale"]}
    check_coded(NvFp4(), Packed(torch.Size((40, 192)), parts), made.dense, variant)


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
