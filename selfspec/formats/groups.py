"""Codes of 4 or 8 bits in groups that share a scale, and perhaps a zero, as they lie in quantised checkpoints.

A weight is its code, less the zero, times the scale, computed in float32, where it is exact for scales of 16 bits. The
layout is that of compressed-tensors' `pack-quantized`; what others write is laid out so, in the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selfspec.formats.format import FormatOfFiles
from selfspec.formats.packed import KernelLinear, Packed, fixed
from selfspec.kernels import native

SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the scales' dtypes in `groups.h`."""

AT_ONCE = 16
"""Inputs that kernels read at once: they divide groups."""

_WORD = 32


class GroupsLinear(KernelLinear):
    """Multiplies by a weight in groups, to the last bit as `selfspec.kernels.native.few_rows` by the dense weight."""

    def __init__(self, packed: Packed, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(packed, bias, dtype)
        self.codes, self.scales, self.zeros = (fixed(packed[part]) for part in Groups.parts)
        self.bits = _WORD * self.codes.shape[1] // self.in_features
        self.group_size = self.in_features // self.scales.shape[1]

    @property
    def operands(self) -> native.Operands:
        setting = self.bits | SCALES[self.scales.dtype] << 8 | self.group_size << 16 | 1 << 40
        zeros = self.zeros if self.zeros.numel() else None
        return native.Operands(self.codes, (self.scales, zeros), native.GROUPS, self.in_features, setting)

    def decoded(self, numbers: Tensor) -> Tensor:
        codes = unpacked(self.codes[numbers], self.bits).unflatten(1, (-1, self.group_size))
        zeros: Tensor | int = 1 << self.bits - 1
        if self.zeros.numel():
            zeros = unpacked(self.zeros.t(), self.bits).t()[numbers, :, None]
        found: Tensor = (codes - zeros) * self.scales[numbers].float()[..., None]
        return found.flatten(1)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the codes in words, `[rows, words]` in int32 to `[rows, words * 32 / bits]`, the lowest bits first."""
    places = torch.arange(0, _WORD, bits, dtype=torch.int32, device=words.device)
    codes: Tensor = words[..., None] >> places & (1 << bits) - 1
    return codes.flatten(1)


@dataclass(frozen=True)
class Groups(FormatOfFiles):
    """Keeps what a quantised checkpoint has of a weight.

    `codes` are words of `32 / bits` codes, `[out, in * bits / 32]` in int32, the first one in the lowest bits; `scales`
    `[out, groups]`, in the dtype `scale`; `zeros`, if it is not `symmetric`, words of codes along the outputs,
    `[out * bits / 32, groups]` in int32, else without numbers: the zero is the middle code.
    """

    name = "groups"
    help = "the codes of a quantised checkpoint, as they lie"
    bits = 4
    parts = ("codes", "scales", "zeros")
    fetched = ("codes",)
    layer: ClassVar[type[GroupsLinear]] = GroupsLinear

    width: int = 4
    group_size: int = 128
    symmetric: bool = True
    scale: str = "bfloat16"

    def empty(self, shape: Sequence[int], device: torch.device) -> Packed:
        if not self.fits(shape):
            raise RuntimeError(f"{list(shape)}: groups of {self.group_size} have no kernel")
        outputs, inputs = shape
        groups = inputs // self.group_size
        zeros = (0,) if self.symmetric else (-(-outputs * self.width // _WORD), groups)
        parts = {
            "codes": torch.empty(outputs, inputs * self.width // _WORD, dtype=torch.int32, device=device),
            "scales": torch.empty(outputs, groups, dtype=getattr(torch, self.scale), device=device),
            "zeros": torch.empty(zeros, dtype=torch.int32, device=device),
        }
        return Packed(torch.Size(shape), parts)

    def fits(self, shape: Sequence[int], device: torch.device | None = None) -> bool:
        # With zeros, weights by scales of more bits are rounded twice by the kernel.
        known = self.width in (4, 8) and (self.symmetric or self.scale in ("bfloat16", "float16"))
        return known and len(shape) == 2 and self.group_size % AT_ONCE == 0 and shape[1] % self.group_size == 0
