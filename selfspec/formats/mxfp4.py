"""Weights in 4-bit floats, with a power of two for each 32 inputs, as in MXFP4 (Rouhani et al., 2023), by torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from selfspec.formats.packed import Packed, PackedLinear, fixed
from selfspec.formats.rounding import Rounded

_BLOCK = 32
# Sizes of E2M1; the fourth bit is the sign.
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Exponents are kept with this added.
_BIAS = 127


class Mxfp4Linear(PackedLinear):
    """A linear layer in 4-bit floats, which are made dense for each product. Arguments as in `PackedLinear`."""

    def __init__(self, packed: Packed, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(packed, bias, dtype)
        self.levels, self.exponents, self.factors = (fixed(packed[part]) for part in ("levels", "exponents", "factors"))

    def product(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.join())

    def join(self) -> Tensor:
        levels = torch.stack([self.levels >> 4, self.levels & 15], -1).flatten(1).int()
        values = torch.tensor(_SIZES, device=levels.device)[levels & 7] * (1 - 2 * (levels >> 3))
        scales = torch.exp2(self.exponents.float() - _BIAS).repeat_interleave(_BLOCK, 1)
        return (values * scales * self.factors).to(self.dtype)


@dataclass(frozen=True)
class Mxfp4(Rounded):
    """Two floats in a byte of `levels`, `[..., out, in / 2]`, the first in the higher bits; `exponents` of blocks."""

    name = "mxfp4"
    help = "the same in 4-bit floats with a power of two for each 32 inputs, by torch's products: to compare with int4"
    bits = 4
    acceptance = 0.75
    parts = ("levels", "exponents", "factors")
    layer: ClassVar[type[Mxfp4Linear]] = Mxfp4Linear

    def empty(self, shape: Sequence[int], device: torch.device) -> Packed:
        *outputs, inputs = shape
        if not self.fits(shape):
            raise RuntimeError(f"{inputs} inputs: blocks of {_BLOCK} do not divide them")
        parts = {
            "levels": torch.empty(*outputs, inputs // 2, dtype=torch.uint8, device=device),
            "exponents": torch.empty(*outputs, inputs // _BLOCK, dtype=torch.uint8, device=device),
            "factors": torch.empty(*outputs[:-1], inputs, dtype=torch.float32, device=device),
        }
        return Packed(torch.Size(shape), parts)

    def fits(self, shape: Sequence[int], device: torch.device | None = None) -> bool:
        return shape[-1] % _BLOCK == 0

    def runs_on(self, kind: str) -> bool:
        return kind != "meta"

    @property
    def sizes(self) -> str:
        return f"with inputs that blocks of {_BLOCK} divide"

    def fill(self, packed: Packed, rows: Tensor) -> None:
        blocks = rows.unflatten(1, (-1, _BLOCK))
        largest = blocks.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
        # The largest is at most 6 by 2 to the exponent, or is cut to it.
        exponents = (torch.floor(torch.log2(largest)) - 2).clamp(-_BIAS, _BIAS)
        scaled = blocks / torch.exp2(exponents)[..., None]
        sizes = torch.tensor(_SIZES, device=rows.device)
        nearest = torch.bucketize(scaled.abs(), (sizes[1:] + sizes[:-1]) / 2)
        levels = (nearest + 8 * (scaled < 0)).flatten(1).to(torch.uint8).unflatten(1, (-1, 2))
        packed["levels"].copy_(levels[..., 0] << 4 | levels[..., 1])
        packed["exponents"].copy_(exponents + _BIAS)
