"""Weights in 8 bits, symmetric, with a scale for each output, rounded by the largest value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from selfspec.formats.packed import Packed, fixed
from selfspec.formats.rounding import Kernels, Rounded, RoundedLinear, as_kept, kernels_of
from selfspec.kernels import native

# With other numbers of inputs ATen's kernel for 8 bits (torch 2.13) reads past the weight: it crashes or is wrong.
_ATEN_INPUTS = 16


class Int8Linear(RoundedLinear):
    """Multiplies by a weight in 8 bits."""

    def __init__(self, packed: Packed, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(packed, bias, dtype)
        if not _takes(self.in_features, packed["levels"].device):
            raise RuntimeError(f"{self.in_features} inputs: ATen's kernel takes multiples of {_ATEN_INPUTS}")
        levels = packed["levels"]
        # Kernels in Triton read 16 at once.
        more = -self.in_features % 16 if self.kernels is Kernels.TRITON else 0
        self.levels = fixed(functional.pad(levels, (0, more)) if more else levels)
        scales = packed["scales"]
        self.scales = fixed(scales.float() if self.kernels is Kernels.NATIVE else scales)

    @property
    def operands(self) -> native.Operands:
        return native.Operands(self.levels, (self.scales,), native.NUMBERS[torch.int8], self.in_features)

    def by_aten(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int8pack_mm(rows, self.levels, self.scales)
        return product


@dataclass(frozen=True)
class Int8(Rounded):
    """Keeps weights in 8 bits: `levels` are int8 in -127..127, `[..., out, in]`, and `scales` `[..., out]`."""

    name = "int8"
    help = "the same layers in 8 bits; int8+mtp is a head in 8 bits"
    bits = 8
    acceptance = 0.97
    parts = ("levels", "scales", "factors")
    layer: ClassVar[type[Int8Linear]] = Int8Linear

    def empty(self, shape: Sequence[int], device: torch.device) -> Packed:
        *outputs, inputs = shape
        parts = {
            "levels": torch.empty(*outputs, inputs, dtype=torch.int8, device=device),
            "scales": torch.empty(*outputs, dtype=torch.bfloat16, device=device),
            "factors": torch.empty(*outputs[:-1], inputs, dtype=torch.float32, device=device),
        }
        return Packed(torch.Size(shape), parts)

    def fits(self, shape: Sequence[int], device: torch.device | None = None) -> bool:
        return device is None or _takes(shape[-1], device)

    @property
    def sizes(self) -> str:
        return f"with multiples of {_ATEN_INPUTS} inputs"

    def fill(self, packed: Packed, rows: Tensor) -> None:
        packed["scales"].copy_(as_kept(rows.abs().amax(1) / 127))
        packed["levels"].copy_((rows / packed["scales"].float()[:, None]).round_().clamp_(-127, 127))


def _takes(inputs: int, device: torch.device) -> bool:
    return inputs % _ATEN_INPUTS == 0 or kernels_of(device) is not Kernels.ATEN
