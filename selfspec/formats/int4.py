"""Weights in 4 bits, with scales and zeros fitted by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from selfspec.errors import DraftConfigError
from selfspec.formats.packed import Packed, fixed
from selfspec.formats.rounding import Kernels, Rounded, RoundedLinear, as_kept, kernels_of
from selfspec.kernels import native

_GROUPS = (32, 64, 128, 256)
# ATen's kernel on a CUDA device takes multiples of these.
_ATEN_INPUTS, _ATEN_OUTPUTS = 128, 8
# Inputs of a block of words for kernels in Triton.
_BLOCK = 128
# A multiple of the rows in any block of ATen's kernels.
_ROWS_AT_ONCE = 1024
# Times that scales and zeros are fitted to their levels: this lowers the squared error by an eighth.
_FITS = 3


class Int4Linear(RoundedLinear):
    """Multiplies by a weight in 4 bits."""

    def __init__(self, packed: Packed, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(packed, bias, dtype)
        levels, scales, zeros = (packed[part] for part in ("levels", "scales", "zeros"))
        self.group_size = self.in_features // scales.shape[1]
        if self.kernels is Kernels.NATIVE and self.group_size != native.GROUP_SIZE:
            self.kernels = Kernels.ATEN
        if self.kernels is Kernels.TRITON:
            self.levels, self.scales = map(fixed, for_triton(levels, scales, zeros))
        elif self.kernels is Kernels.NATIVE:
            # Only some rows at a time: copies of a whole head would take more memory than its substitute.
            parts = zip(*(part.split(_ROWS_AT_ONCE) for part in (levels, scales, zeros)), strict=True)
            self.levels = fixed(torch.cat([native.in_blocks(*part) for part in parts]))
        else:
            self.levels = fixed(_for_aten(levels))
            self.scales_and_zeros = fixed(torch.stack([scales, zeros], -1).transpose(0, 1).contiguous())

    @property
    def operands(self) -> native.Operands:
        return native.Operands(self.levels, (), native.FOUR_BITS, self.in_features)

    def by_aten(self, rows: Tensor) -> Tensor:
        on_cpu = rows.device.type == "cpu"
        kernel = torch.ops.aten._weight_int4pack_mm_for_cpu if on_cpu else torch.ops.aten._weight_int4pack_mm
        product: Tensor = kernel(rows, self.levels, self.group_size, self.scales_and_zeros)
        return product


@cache
def _aten_runs(device: torch.device) -> bool:
    """Return whether a CUDA device has ATen's kernel, as a small product shows: old ones and most of AMD's lack it."""
    levels = torch.zeros(_ATEN_OUTPUTS * 16, _ATEN_INPUTS // 2, dtype=torch.uint8, device=device)
    scales = torch.zeros(_ATEN_INPUTS // 32, len(levels), 2, dtype=torch.bfloat16, device=device)
    row = torch.zeros(1, _ATEN_INPUTS, dtype=torch.bfloat16, device=device)
    try:
        torch.ops.aten._weight_int4pack_mm(row, _for_aten(levels), 32, scales)
    except RuntimeError:
        return False
    return True


def for_triton(pairs: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """Return levels, `[out, words]`, as `triton_products` reads them, and scales with zeros, `[out, groups, 2]`."""
    # Groups of no inputs fill up the last block.
    more = -pairs.shape[1] % (_BLOCK // 2)
    groups = functional.pad(torch.stack([scales, zeros], -1), (0, 0, 0, more * scales.shape[1] // pairs.shape[1]))
    # Only some rows at a time: they are laid out in several steps.
    some = (_in_words(functional.pad(rows, (0, more))) for rows in pairs.split(_ROWS_AT_ONCE))
    return torch.cat(list(some)), groups.contiguous()


def _in_words(pairs: Tensor) -> Tensor:
    # Bytes with the first of two in the lower bits: four of them are a word.
    swapped = (pairs >> 4 | pairs << 4).unflatten(1, (-1, 4, 4, 4))
    words: Tensor = swapped.transpose(2, 3).contiguous().view(torch.int32).flatten(1)
    return words


def _for_aten(pairs: Tensor) -> Tensor:
    """Return levels, two in a byte, in the layout of the device's kernel."""
    if pairs.device.type != "cpu":
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
        return packed
    # Only some rows at a time, whose layout does not depend on other rows: the kernel takes levels of 32 bits.
    some = pairs.split(_ROWS_AT_ONCE)
    levels = (torch.stack([rows >> 4, rows & 15], -1).flatten(1).to(torch.int32) for rows in some)
    return torch.cat([torch.ops.aten._convert_weight_to_int4pack_for_cpu(rows, 1) for rows in levels])


@dataclass(frozen=True)
class Int4(Rounded):
    """Keeps weights in 4 bits, 0 to 15, two in a byte of `levels`, `[..., out, in / 2]`, the first in the higher bits.

    `scales`, and `zeros`, the values of level 8, are `[..., out, groups]` in bfloat16, each for `group_size` weights.
    """

    name = "int4"
    help = "the same in 4 bits; int4+exit:E is the first E of them, int4+skip:layers=2 all but some"
    bits = 4
    acceptance = 0.9
    parts = ("levels", "scales", "factors", "zeros")
    layer: ClassVar[type[Int4Linear]] = Int4Linear
    laying_out = 2

    group_size: int = 32

    def __post_init__(self) -> None:
        if type(self.group_size) is not int or self.group_size not in _GROUPS:
            raise DraftConfigError(f"group_size={self.group_size!r}: choose one of {', '.join(map(str, _GROUPS))}")

    def empty(self, shape: Sequence[int], device: torch.device) -> Packed:
        *outputs, inputs = shape
        if not self.fits(shape):
            raise RuntimeError(f"{inputs} inputs: groups of {self.group_size} do not divide them")
        groups = torch.empty(*outputs, inputs // self.group_size, dtype=torch.bfloat16, device=device)
        parts = {
            "levels": torch.empty(*outputs, inputs // 2, dtype=torch.uint8, device=device),
            "scales": groups,
            "factors": torch.empty(*outputs[:-1], inputs, dtype=torch.float32, device=device),
            "zeros": torch.empty_like(groups),
        }
        return Packed(torch.Size(shape), parts)

    def fits(self, shape: Sequence[int], device: torch.device | None = None) -> bool:
        if shape[-1] % self.group_size or device is None or device.type != "cuda":
            return shape[-1] % self.group_size == 0
        aten_takes = shape[-1] % _ATEN_INPUTS == 0 == shape[-2] % _ATEN_OUTPUTS
        return kernels_of(device) is Kernels.TRITON or (aten_takes and _aten_runs(device))

    @property
    def sizes(self) -> str:
        return f"with inputs that groups of {self.group_size} divide"

    def fill(self, packed: Packed, rows: Tensor) -> None:
        groups = rows.unflatten(1, (-1, self.group_size))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scales = as_kept((high - low) / 15)
        zeros = (low + 8 * scales.float()).to(torch.bfloat16)
        levels = _nearest(groups, scales, zeros)
        for _ in range(_FITS):
            # Fit a line of weights by levels with the least squared error; if all levels are equal, use the mean.
            mean = levels.mean(-1, keepdim=True)
            apart = levels - mean
            spread = apart.square().sum(-1, keepdim=True)
            slope = (apart * groups).sum(-1, keepdim=True) / spread
            scales = torch.where(spread > 0, as_kept(slope), scales)
            zeros = (groups.mean(-1, keepdim=True) + (8 - mean) * scales.float()).to(torch.bfloat16)
            levels = _nearest(groups, scales, zeros)
        # Two in a byte.
        first, second = levels.flatten(1).to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
        packed["levels"].copy_(first << 4 | second)
        packed["scales"].copy_(scales[..., 0])
        packed["zeros"].copy_(zeros[..., 0])


def _nearest(weights: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Return the nearest levels for weights, in float32; scales and zeros are broadcast."""
    levels: Tensor = ((weights - zeros.float()) / scales.float() + 8).round_().clamp_(0, 15)
    return levels
