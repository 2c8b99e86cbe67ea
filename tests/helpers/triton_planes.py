"""Checks of weights in planes in Triton, on a device or by the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor

from selfspec.formats import planes, upper
from selfspec.formats.packed import Packed
from selfspec.formats.planes import Planes, PlanesLinear
from selfspec.formats.rounding import Kernels
from selfspec.formats.upper import Upper, UpperLinear
from selfspec.kernels import native

SIZES = [(3, 37), (33, 72), (2, 1100)]
PARTS = ("upper", "rows", "lower", "escapes")
ROWS = [1, 3, 17, 65]
OFF_BY = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def drawn(outputs: int, inputs: int) -> Tensor:
    """Weights of few octaves, with zeros, and with escapes: some outside, one infinite."""
    weight = torch.randn(outputs, inputs) * 0.02
    weight[torch.rand(outputs, inputs) < 0.05] = 0.0
    weight.view(-1)[5::197] *= -(2.0**-20)
    return weight.bfloat16()


@contextmanager
def kernels(name: str) -> Iterator[None]:
    """Layers in planes run by kernels of this name."""
    with ExitStack() as stack:
        for module in (planes, upper):
            stack.enter_context(mock.patch.object(module, "kernels_of", return_value=Kernels[name]))
        stack.enter_context(mock.patch.object(native, "available", return_value=False))
        yield


def all_escapes(packed: Packed, weight: Tensor) -> Packed:
    """The same weight, of which planes hold nothing."""
    outputs, inputs = weight.shape
    column = torch.arange(inputs, device=weight.device)
    place = column // 32 * 32 + column % 16 * 2 + column // 16 % 2
    order = place.argsort()
    bits = weight.view(torch.int16).to(torch.int32) & 0xFFFF
    ends = torch.arange(1, outputs + 1, device=weight.device) * inputs
    parts = {
        "upper": torch.full_like(packed["upper"], 0x55),
        "lower": torch.full_like(packed["lower"], 0xAA),
        "rows": torch.stack([packed["rows"][0], ends.to(torch.int32)]),
        "escapes": (place << 16 | bits)[:, order].flatten().to(torch.int32),
    }
    return Packed(weight.shape, parts)


def check(rows: int, dtype: torch.dtype, device: str) -> None:
    """Joined weights have their bits, and products are those of the weight, of the upper plane too."""
    for outputs, inputs in SIZES:
        weight = drawn(outputs, inputs).to(device)
        whole = PlanesLinear(Planes().pack(weight), None, dtype)
        draft = UpperLinear(Upper().pack(whole.weight), None, dtype)
        states = torch.randn(rows, 2 * inputs).to(device, dtype)[:, ::2]
        for layer in (whole, draft):
            with kernels("ATEN"):
                joined = layer.join()
            with kernels("TRITON"):
                assert torch.equal(layer.join(), joined)
                found, expected = layer.product(states), states.double() @ joined.double().t()
            assert found.dtype == dtype
            off = (found.double() - expected).norm() / expected.norm()
            assert off < OFF_BY[dtype], f"{type(layer)}, {rows} rows, {outputs} x {inputs}, {dtype}: off by {off:.2g}"


def check_bits(device: str) -> None:
    """Every number comes back, by the number of its row; an id without a row is NaN."""
    from selfspec.kernels.triton_planes import rows_in_planes

    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    weight = numbers[torch.randperm(len(numbers))].view(torch.bfloat16).view(-1, 128).to(device)
    with mock.patch("selfspec.formats.planes._MOST_ESCAPES", 1.0):
        packed = Planes().pack(weight)
    # The interpreter takes too long for all of them.
    some = torch.arange(len(weight)) if device != "cpu" else torch.tensor([511, 3, 0])
    ids = torch.cat([some, torch.tensor([512, -1])]).to(device)
    found = rows_in_planes(128, torch.bfloat16, ids, *map(packed.parts.get, PARTS))
    assert torch.equal(found[:-2].view(torch.int16), weight[ids[:-2]].view(torch.int16))
    assert found[-2:].isnan().all()


def check_order(rows: int, dtype: torch.dtype, device: str) -> None:
    """A product does not depend on what is in planes and what beside them, to the last bit."""
    from selfspec.kernels.triton_planes import product_in_planes

    weight = drawn(3, 83).to(device)
    packed = Planes().pack(weight)
    states = torch.randn(rows, 83).to(device, dtype)
    products = [
        product_in_planes(states, *map(each.parts.get, PARTS)) for each in (packed, all_escapes(packed, weight))
    ]
    assert torch.equal(*products)


def check_all() -> None:
    """Check what the interpreter can."""
    check_bits("cpu")
    for rows in ROWS:
        for dtype in OFF_BY:
            # The interpreter multiplies matrices in bfloat16 as if they were integers.
            if not 1 < rows < 65 or dtype != torch.bfloat16:
                check(rows, dtype, "cpu")
    for rows in (1, 2):
        check_order(rows, torch.float32, "cpu")
