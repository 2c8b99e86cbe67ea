"""Checks of the products in Triton. As a program: by Triton's interpreter on the CPU, with TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfspec.formats.format import formats
from selfspec.formats.packed import Packed

SIZES = [(64, 128), (70, 96), (5, 576), (33, 2080)]
ROWS = [1, 3, 16, 17]
OFF_BY = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def values(rounded: Packed) -> Tensor:
    """What a rounded weight says, `[out, in]`."""
    if "zeros" not in rounded.parts:
        return rounded["levels"].double() * rounded["scales"].double()[:, None]
    levels = torch.stack([rounded["levels"] >> 4, rounded["levels"] & 15], -1).flatten(1).double()
    group = rounded.shape[1] // rounded["scales"].shape[1]
    scales, zeros = (part.double().repeat_interleave(group, 1) for part in (rounded["scales"], rounded["zeros"]))
    return (levels - 8) * scales + zeros


def check(bits: int, rows: int, dtype: torch.dtype, device: str, group: int = 32) -> None:
    """Products of all sizes, of states that are not contiguous, are those of what the rounded weights say."""
    from selfspec.kernels.triton_products import low_bits_product

    for outputs, inputs in SIZES:
        kind: Any = formats()[f"int{bits}"]
        format = kind() if bits == 8 else kind(group)
        rounded = format.pack((torch.randn(outputs, inputs) * torch.rand(inputs)).to(device))
        states = torch.randn(rows, 2 * inputs).to(device, dtype)[:, ::2]
        found = low_bits_product(states, *map(rounded.parts.get, ("factors", "levels", "scales", "zeros")))
        expected = (states.double() * rounded["factors"].double()) @ values(rounded).T
        assert found.dtype == dtype
        off = (found.double() - expected).norm() / expected.norm()
        assert off < OFF_BY[dtype], f"{bits} bits, {rows} rows, {outputs} x {inputs}, {dtype}: off by {off:.2g}"


if __name__ == "__main__":
    torch.manual_seed(0)
    for bits in (8, 4):
        for rows in ROWS:
            for dtype in OFF_BY:
                # The interpreter multiplies matrices in bfloat16 as if they were integers.
                if rows == 1 or dtype != torch.bfloat16:
                    check(bits, rows, dtype, "cpu")
    print("all equal")
