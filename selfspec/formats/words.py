"""Codes of GPTQ and AWQ, which lie with the outputs side by side, and are laid out as `Groups`, in as many bytes.

A weight is its code, less the zero, times the scale. GPTQ has words of codes along the inputs, and its first version
keeps each zero less 1 (arXiv 2210.17323). AWQ has words of codes along the outputs, in an order of their own
(arXiv 2306.00978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfspec.formats.groups import Groups
from selfspec.formats.packed import Packed

_WORD = 32
# Of the outputs of a word of AWQ, from its lowest bits on.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


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
