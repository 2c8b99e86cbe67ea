"""The upper plane of weights in planes, as a draft: 8-bit floats that are in memory already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from selfspec.formats.format import Format
from selfspec.formats.packed import Packed, PackedLinear, PackedWeight, fixed
from selfspec.formats.planes import PlanesLinear, by_triton, in_order, joined, rows_by_triton
from selfspec.formats.rounding import Kernels, kernels_of
from selfspec.kernels import native


class UpperLinear(PackedLinear):
    """Multiplies by the upper plane of a weight, with half a step in place of the lower one."""

    def __init__(self, packed: Packed, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(packed, bias, dtype)
        self.upper, self.rows = fixed(packed["upper"]), fixed(packed["rows"])

    def product(self, states: Tensor) -> Tensor:
        if kernels_of(self.upper.device) is Kernels.TRITON:
            return by_triton(states, self.rows_of, self.upper, self.rows)
        if self.upper.device.type == "cpu" and native.available():
            held = native.Operands(self.upper, (self.rows,), native.UPPER, self.in_features)
            return native.few_rows_packed(states, held)
        return functional.linear(states, self.join())

    def join(self) -> Tensor:
        return self.rows_of(torch.arange(self.out_features, device=self.upper.device))

    def rows_of(self, ids: Tensor) -> Tensor:
        if kernels_of(self.upper.device) is Kernels.TRITON:
            return rows_by_triton(self, ids, self.upper, self.rows)
        upper = self.upper[ids.flatten()]
        bits = joined(upper, torch.full_like(upper[:, ::2], 0x88), self.rows[0, ids.flatten()])
        return in_order(bits)[:, : self.in_features].to(self.dtype).view(*ids.shape, self.in_features)


@dataclass(frozen=True)
class Upper(Format):
    """Reads 8 of the 12 bits that `Planes`, which names the parts, keeps of a weight. It takes no memory of its own."""

    name = "upper"
    help = "the same layers by the upper plane of weights in planes, which takes no memory"
    bits = 8
    # 1 - TV at temperature 1: SmolLM2-135M .87 to .90, Gemma 3 270M .93.
    acceptance = 0.9
    parts = ("upper", "rows")
    layer: ClassVar[type[UpperLinear]] = UpperLinear
    copies = False

    def empty(self, shape: Sequence[int], device: torch.device) -> Packed:
        return Packed(torch.Size(shape), {})

    def takes(self, weight: Tensor) -> bool:
        return isinstance(weight, PackedWeight) and issubclass(weight.kind, PlanesLinear)

    @property
    def sizes(self) -> str:
        return "in planes: selfspec.load(path, weights='planes')"

    def pack(self, weight: Tensor) -> Packed:
        if not isinstance(weight, PackedWeight) or not self.takes(weight):
            raise RuntimeError("a weight that is not in planes has no upper plane")
        parts = dict(weight.layer.named_parameters())
        return Packed(weight.layer.shape, {part: parts[part].detach() for part in self.parts})
