"""Rounding to integers with scales, for the fastest kernels of a device: selfspec's own, those in Triton, or ATen's.

Columns of different sizes lower the acceptance rate in few bits, so each is first divided by a factor, and its input
multiplied by it, as in SmoothQuant (Xiao et al., 2023) and AWQ (Lin et al., 2024), whose factors need data.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache

import torch
from torch import Tensor

from selfspec.formats.format import Format
from selfspec.formats.packed import Packed, PackedLinear, dense, fixed, some_rows
from selfspec.kernels import native
from selfspec.kernels.trial import runs_triton

# Weights that are rounded at once: copies of a whole head would take more memory than all substitutes.
_AT_ONCE = 1 << 17
_SMALLEST = torch.finfo(torch.float32).tiny
# Inputs and outputs of the weight that a device is tested with: every kernel takes it.
_PROBED = 128


@dataclass(frozen=True)
class Rounded(Format):
    """Keeps integer `levels`, `scales` in bfloat16, and `factors` of the inputs, `[..., in]` in float32.

    Columns are divided by their factors. Columns of zeros have 0: few bits may hold no zero, and inputs that nothing
    reads may be large.
    """

    @torch.no_grad()
    def pack(self, weight: Tensor, factors: Tensor | None = None) -> Packed:
        """Pack a weight, `[..., out, in]`, with `factors` of its inputs, `[..., in]`; None: the sizes of columns."""
        packed = self.empty(weight.shape, weight.device)
        weight = dense(weight.detach())
        packed["factors"].copy_(column_sizes(weight) if factors is None else factors)
        self._fill_all(packed, weight)
        return packed

    def pack_head(self, weight: Tensor) -> Packed:
        return self.pack(weight, torch.ones(weight.shape[-1], device=weight.device))

    def runs_on(self, kind: str) -> bool:
        return has_kernels(kind)

    @abstractmethod
    def fill(self, packed: Packed, rows: Tensor) -> None:
        """Round `[out, in]`, float32, whose columns were divided by their factors."""

    def _fill_all(self, packed: Packed, weight: Tensor) -> None:
        if weight.ndim > 2:
            for number, part in enumerate(weight):
                self._fill_all(packed.of_expert(number), part)
            return
        for some in some_rows(weight, _AT_ONCE):
            self.fill(rows_of(packed, some), evened(weight[some], packed["factors"]))


def rows_of(packed: Packed, some: slice) -> Packed:
    """Return a view of some rows of a rounded weight, `[out, in]`."""
    parts = {name: part if name == "factors" else part[some] for name, part in packed.parts.items()}
    return Packed(torch.Size((len(parts["levels"]), packed.shape[1])), parts)


def column_sizes(weight: Tensor) -> Tensor:
    """Return the root mean square of each column of a weight, `[..., out, in]`, divided by their mean: `[..., in]`."""
    if weight.ndim > 2:
        return torch.stack([column_sizes(part) for part in weight])
    # In float64, so that the result does not depend on how the sum is split.
    squares = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
    for some in some_rows(weight, _AT_ONCE):
        squares += weight[some].double().square().sum(0)
    sizes = squares.sqrt()
    return (sizes / sizes.mean().clamp(min=_SMALLEST)).float()


def evened(weight: Tensor, factors: Tensor) -> Tensor:
    """Divide the columns of a weight, `[out, in]`, by their factors, in float32."""
    return weight.float() / factors.clamp(min=_SMALLEST)


def as_kept(scales: Tensor) -> Tensor:
    """Round scales first, so that weights are rounded with the scales that the kernels use."""
    return scales.clamp(min=_SMALLEST).to(torch.bfloat16)


class Kernels(Enum):
    """Names the library whose products run."""

    ATEN = auto()
    NATIVE = auto()
    TRITON = auto()


def kernels_of(device: torch.device) -> Kernels:
    """Return the fastest kernels for weights on a device."""
    if device.type == "cpu" and native.available():
        return Kernels.NATIVE
    return Kernels.TRITON if runs_triton(device) else Kernels.ATEN


@cache
def has_kernels(kind: str) -> bool:
    """Return whether rounded layers run on a kind of device, such as "cuda", as a small product shows."""
    if kind in ("cpu", "cuda", "meta"):
        return kind != "meta"
    try:
        row = torch.zeros(1, _PROBED, dtype=torch.bfloat16, device=kind)
        levels, scales = torch.zeros(_PROBED, _PROBED, device=kind), row.new_ones(_PROBED)
        torch.ops.aten._weight_int8pack_mm(row, levels.to(torch.int8), scales)
        torch.ops.aten._convert_weight_to_int4pack(levels[:, ::2].to(torch.uint8).contiguous(), 8)
    # A missing operation is a NotImplementedError, which is a RuntimeError.
    except RuntimeError:
        return False
    return True


class RoundedLinear(PackedLinear):
    """Multiplies by a rounded weight, by the kernels of its device."""

    levels: Tensor
    scales: Tensor

    def __init__(self, packed: Packed, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(packed, bias, dtype)
        self.factors = fixed(packed["factors"])
        self.kernels = kernels_of(packed["levels"].device)

    @property
    @abstractmethod
    def operands(self) -> native.Operands:
        """Operands of selfspec's own kernels."""

    @abstractmethod
    def by_aten(self, rows: Tensor) -> Tensor:
        """Multiply rows, `[rows, in]` to `[rows, out]` in bfloat16, by ATen's kernel."""

    def product(self, states: Tensor) -> Tensor:
        if self.kernels is Kernels.NATIVE:
            return native.few_rows_packed(states, self.operands, self.factors)
        if self.kernels is Kernels.TRITON:
            # Triton is not installed everywhere.
            from selfspec.kernels.triton_products import low_bits_product

            return in_rows(lambda rows: low_bits_product(rows, self.factors, self.levels, self.scales), states)
        scaled = (states * self.factors).to(states.dtype)
        return in_rows(lambda rows: self.by_aten(rows.to(torch.bfloat16)), scaled)


def in_rows(product: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """Call a product of `[rows, in]` to `[rows, out]` with states, `[..., in]` to `[..., out]`."""
    # Plain numbers, which no program records.
    shape = [int(size) for size in states.shape]
    found = product(states.reshape(math.prod(shape[:-1]), shape[-1]))
    return found.view(*shape[:-1], int(found.shape[-1]))
