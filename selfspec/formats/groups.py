"""Codes of 4 or 8 bits in groups that share a scale, and perhaps a zero, as they lie in quantised checkpoints.

A weight is its code, less the zero, times the scale, computed in float32, where it is exact for scales of 16 bits. The
layout is that of compressed-tensors' `pack-quantized`. GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978) have outputs
side by side, and are laid out so, in the same bytes. GPTQ has words of codes along the inputs, and its first version
keeps each zero less 1; AWQ has words of codes along the outputs, in an order of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from selfspec.formats.coded import AT_ONCE, CodedLinear
from selfspec.formats.format import FormatOfFiles
from selfspec.formats.packed import Packed

_WORD = 32
# Of the outputs of a word of AWQ, from its lowest bits on.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class GroupsLinear(CodedLinear):
    """Multiplies by a weight in groups, to the last bit as `selfspec.kernels.native.few_rows` by the dense weight."""

    def __init__(self, packed: Packed, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(packed, bias, dtype)
        self.kind = _WORD * self.codes.shape[1] // self.in_features

    def named(self, codes: Tensor) -> Tensor:
        return unpacked(codes, self.kind)

    def decoded(self, numbers: Tensor) -> Tensor:
        zeros: Tensor | int = 1 << self.kind - 1
        if self.zeros is not None:
            zeros = self.named(self.zeros.t()).t()[numbers, :, None]
        codes: Tensor = self.named(self.codes[numbers]).unflatten(1, (-1, self.inputs))
        return ((codes - zeros) * self._scales(numbers)[..., None]).flatten(1)


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


@dataclass(frozen=True)
class WordsOfGptq(Groups):
    """Reads `qweight`, `[in * bits / 32, out]` in int32, `scales`, `[groups, out]`, and `qzeros` as AWQ has them.

    Attributes:
        less: what each zero is kept less of: 1 in the first version, 0 in the second.
    """

    name = "gptq"
    help = "the codes of a checkpoint of GPTQ"
    parts = ("qweight", "scales", "qzeros")
    fetched = ("qweight",)
    laying_out = 2

    symmetric: bool = False
    less: int = 1

    def empty(self, shape: Sequence[int], device: torch.device) -> Packed:
        laid_out = Groups(self.width, self.group_size, self.symmetric, self.scale).empty(shape, device)
        parts = {own: laid_out[part].mT.contiguous() for own, part in zip(self.parts, Groups.parts, strict=True)}
        return Packed(laid_out.shape, parts)

    def parameter(self, packed: Packed, dtype: torch.dtype, transposed: bool = False) -> nn.Parameter:
        parts = {
            "codes": self.codes(packed["qweight"]),
            "scales": packed["scales"].mT.contiguous(),
            "zeros": self.zeros(packed["qzeros"]).mT.contiguous(),
        }
        return super().parameter(Packed(packed.shape, parts), dtype, transposed)

    def codes(self, words: Tensor) -> Tensor:
        """Lay out codes as words along the inputs, `[out, in * bits / 32]`, the first one in the lowest bits."""
        return words.mT.contiguous()

    def zeros(self, words: Tensor) -> Tensor:
        """Return words of zeros along the outputs, `[groups, out * bits / 32]`, the first one in the lowest bits."""
        return words + self.less * sum(1 << place for place in range(0, _WORD, self.width))


@dataclass(frozen=True)
class WordsOfAwq(WordsOfGptq):
    """Reads `qweight`, `[in, out / 8]` in int32, `scales`, `[groups, out]`, and `qzeros`, `[groups, out / 8]`."""

    name = "awq"
    help = "the codes of a checkpoint of AWQ"
    less: int = 0

    def empty(self, shape: Sequence[int], device: torch.device) -> Packed:
        outputs, inputs = shape
        words = torch.empty(inputs, outputs * self.width // _WORD, dtype=torch.int32, device=device)
        found = super().empty(shape, device)
        return Packed(found.shape, {**found.parts, "qweight": words})

    def fits(self, shape: Sequence[int], device: torch.device | None = None) -> bool:
        return super().fits(shape, device) and self.width == 4 and shape[0] % 8 == 0

    def codes(self, words: Tensor) -> Tensor:
        found = words.new_empty(8 * words.shape[1], words.shape[0] // 8)
        for place, output in enumerate(_ORDER):
            found[output::8] = _words([words[each::8] >> 4 * place & 15 for each in range(8)]).mT
        return found

    def zeros(self, words: Tensor) -> Tensor:
        return _words([words >> 4 * _ORDER.index(each) & 15 for each in range(8)])


def _words(codes: Sequence[Tensor]) -> Tensor:
    """Put codes of 4 bits into words, the first one in the lowest bits."""
    found = torch.zeros_like(codes[0])
    for place, each in enumerate(codes):
        found |= each << 4 * place
    return found
