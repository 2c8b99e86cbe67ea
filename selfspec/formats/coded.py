"""Codes of quantised checkpoints, in groups that share a scale: integers, numbers of a table, or floats of 8 bits.

A weight is what its code stands for, times the scale, rounded once to float32, and everything is read as it lies.
Integers may have a zero, which the code is less of; by scales of 16 bits their weights are exact in float32. Their
layout is that of compressed-tensors' `pack-quantized`. GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978) have outputs
side by side, and are laid out so, in the same bytes. GPTQ has words of codes along the inputs, and its first version
keeps each zero less 1; AWQ has words of codes along the outputs, in an order of their own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from selfspec.formats.format import FormatOfFiles
from selfspec.formats.packed import KernelLinear, Packed, fixed
from selfspec.kernels import native

# Inputs that kernels read at once: they divide groups.
_AT_ONCE = 16
# Numbers in `groups.h` of the scales' dtypes, and of scales in bytes: exponents, or rounded themselves.
_SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_EXPONENTS, _ROUNDED = 3, 4
_NAMED = 16
# How many scales of NF4 are rounded together.
_TOGETHER = 256
_WORD = 32
# Of the outputs of a word of AWQ, from its lowest bits on.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class CodedLinear(KernelLinear):
    """Multiplies by codes, to the last bit as `selfspec.kernels.native.few_rows` by the dense weight.

    A scale is that of a row, of a square block, or of all rows, by how many there are.

    Attributes:
        kind: number of this kind of codes in `program.cpp`.
        zeros: words of zeros, which codes are less of; None: there are none.
    """

    kind: int

    def __init__(self, packed: Packed, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(packed, bias, dtype)
        self.codes, self.scales = fixed(packed["codes"]), fixed(packed["scales"])
        zeros = packed.parts.get("zeros")
        self.zeros = fixed(zeros) if zeros is not None and zeros.numel() else None
        # The table, and behind it what rounded scales stand for, what is added to them, and their factors.
        self.numbers = fixed(packed.parts.get("numbers", torch.empty(0, device=self.codes.device)))
        self.inputs = self.in_features // self.scales.shape[1]
        rows = self.scales.shape[0]
        self.outputs = 1 if rows == self.out_features else self.out_features if rows == 1 else self.inputs

    @property
    def operands(self) -> native.Operands:
        scale = _SCALES.get(self.scales.dtype, _ROUNDED if self.numbers.numel() > _NAMED else _EXPONENTS)
        setting = self.kind | scale << 8 | self.inputs << 16 | self.outputs << 40
        numbers = self.numbers if self.numbers.numel() else None
        return native.Operands(self.codes, (self.scales, self.zeros, numbers), native.GROUPS, self.in_features, setting)

    def decoded(self, numbers: Tensor) -> Tensor:
        found: Tensor = self.named(self.codes[numbers]).unflatten(1, (-1, self.inputs))
        return (found * self._scales(numbers // self.outputs)[..., None]).flatten(1)

    @abstractmethod
    def named(self, codes: Tensor) -> Tensor:
        """Look codes up in bytes, `[rows, bytes]`; return their numbers, `[rows, in]` in float32."""

    def _scales(self, rows: Tensor) -> Tensor:
        scales = self.scales[rows]
        if scales.dtype != torch.uint8:
            return scales.float()
        if self.numbers.numel() <= _NAMED:
            return scales.view(torch.float8_e8m0fnu).float()
        steps, groups = self.numbers[_NAMED:], self.scales.shape[1]
        places = rows[:, None] * groups + torch.arange(groups, device=rows.device)
        return steps[scales.long()] * steps[1 + _TOGETHER + places // _TOGETHER] + steps[_TOGETHER]


class Float8Linear(CodedLinear):
    """Multiplies by floats of 8 bits with 4 of exponent and 3 of mantissa."""

    kind = 18

    def named(self, codes: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).float()


class LowerFirstLinear(CodedLinear):
    """Multiplies by numbers of a table; of two codes in a byte the first is in the lower bits."""

    kind = 16

    def named(self, codes: Tensor) -> Tensor:
        return self._of_table(codes & 15, codes >> 4)

    def _of_table(self, first: Tensor, second: Tensor) -> Tensor:
        return self.numbers[torch.stack([first, second], 2).flatten(1).long()]


class UpperFirstLinear(LowerFirstLinear):
    """Multiplies by numbers of a table; of two codes in a byte the first is in the upper bits."""

    kind = 17

    def named(self, codes: Tensor) -> Tensor:
        return self._of_table(codes >> 4, codes & 15)


@dataclass(frozen=True)
class Coded(FormatOfFiles):
    """Keeps `codes`, `[..., out, in * bits / 8]` in bytes, and `scales`, as a quantised checkpoint has them."""

    bits = 4
    parts: ClassVar[tuple[str, ...]] = ("codes", "scales")
    fetched = ("codes",)

    inputs: int = 32

    def empty(self, shape: Sequence[int], device: torch.device) -> Packed:
        if not self.fits(shape):
            raise RuntimeError(f"{list(shape)}: groups of {self.inputs} have no kernel")
        codes = torch.empty(*shape[:-1], shape[-1] * self.bits // 8, dtype=torch.uint8, device=device)
        return Packed(torch.Size(shape), {"codes": codes, "scales": self._scales(shape, device)})

    def _scales(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return torch.empty(*shape[:-1], shape[-1] // self.inputs, dtype=torch.uint8, device=device)

    def fits(self, shape: Sequence[int], device: torch.device | None = None) -> bool:
        return len(shape) >= 2 and self.inputs % _AT_ONCE == 0 and shape[-1] % self.inputs == 0


@dataclass(frozen=True)
class Float8(Coded):
    """Keeps floats of 8 bits, and a scale for each row, for each block of as many outputs as inputs, or for all."""

    name = "fp8"
    help = "the floats of 8 bits of a checkpoint, as they lie"
    bits = 8
    layer: ClassVar[type[CodedLinear]] = Float8Linear

    inputs: int = 128
    outputs: int = 128
    scale: str = "float32"

    def _scales(self, shape: Sequence[int], device: torch.device) -> Tensor:
        blocks = (-(-shape[0] // self.outputs), shape[1] // self.inputs)
        return torch.empty(blocks, dtype=getattr(torch, self.scale), device=device)

    def fits(self, shape: Sequence[int], device: torch.device | None = None) -> bool:
        blocks = self.outputs in (1, self.inputs) or self.outputs >= shape[0]
        return super().fits(shape, device) and len(shape) == 2 and blocks


@dataclass(frozen=True)
class MxFp4(Coded):
    """Keeps floats of 4 bits in groups of 32, whose scales are powers of 2 (OCP Microscaling Formats 1.0)."""

    name = "mxfp4"
    help = "the floats of 4 bits of a checkpoint, as they lie"
    layer: ClassVar[type[CodedLinear]] = LowerFirstLinear

    def parameter(self, packed: Packed, dtype: torch.dtype, transposed: bool = False) -> nn.Parameter:
        numbers = _floats_of_4_bits(packed["codes"].device).expand(*packed.shape[:-2], -1)
        return super().parameter(Packed(packed.shape, {**packed.parts, "numbers": numbers}), dtype, transposed)


@dataclass(frozen=True)
class NvFp4(Coded):
    """Keeps floats of 4 bits in groups of 16, whose scales are floats of 8 bits, over the `divisor` of all."""

    name = "nvfp4"
    help = "the floats of 4 bits of a checkpoint, as they lie"
    parts = ("codes", "scales", "divisor")
    layer: ClassVar[type[CodedLinear]] = LowerFirstLinear

    inputs: int = 16

    def empty(self, shape: Sequence[int], device: torch.device) -> Packed:
        found = super().empty(shape, device)
        return Packed(found.shape, {**found.parts, "divisor": torch.empty(1, device=device)})

    def parameter(self, packed: Packed, dtype: torch.dtype, transposed: bool = False) -> nn.Parameter:
        device, scales = packed["codes"].device, packed["scales"]
        steps = torch.arange(_TOGETHER, device=device).byte().view(torch.float8_e4m3fn).float() / packed["divisor"]
        # Nothing is added to a step, and its factors are 1.
        added, factors = steps.new_zeros(1), steps.new_ones(-(-scales.numel() // _TOGETHER))
        numbers = torch.cat([_floats_of_4_bits(device), steps, added, factors])
        parts = {"codes": packed["codes"], "scales": scales, "numbers": numbers}
        return super().parameter(Packed(packed.shape, parts), dtype, transposed)


def _floats_of_4_bits(device: torch.device) -> Tensor:
    """Return the numbers of codes with 2 bits of exponent and 1 of mantissa, `[16]`."""
    half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device)
    return torch.cat([half, -half])


@dataclass(frozen=True)
class NormalFloat4(Coded):
    """Keeps the 4 bits of bitsandbytes: codes of a table, NF4's or FP4's (QLoRA, arXiv 2305.14314).

    Attributes:
        rounded: whether scales are bytes, that stand for one of `steps`, `[256]`, times one of `factors`, one for 256
            scales, plus `added`: double quantisation. Else they are in float32.
    """

    name = "nf4"
    help = "the codes of a checkpoint of bitsandbytes, as they lie"
    parts = ("codes", "scales", "table", "steps", "factors")
    layer: ClassVar[type[CodedLinear]] = UpperFirstLinear

    inputs: int = 64
    rounded: bool = True
    added: float = 0.0

    def empty(self, shape: Sequence[int], device: torch.device) -> Packed:
        found = super().empty(shape, device)
        scales = found["scales"]
        sizes = {"table": _NAMED, "steps": 0, "factors": 0}
        if self.rounded:
            sizes |= {"steps": _TOGETHER, "factors": -(-scales.numel() // _TOGETHER)}
        more = {part: torch.empty(size, device=device) for part, size in sizes.items()}
        return Packed(found.shape, {**found.parts, "scales": scales if self.rounded else scales.float(), **more})

    def parameter(self, packed: Packed, dtype: torch.dtype, transposed: bool = False) -> nn.Parameter:
        added = packed["table"].new_full((int(self.rounded),), self.added)
        numbers = torch.cat([packed["table"], packed["steps"], added, packed["factors"]])
        parts = {"codes": packed["codes"], "scales": packed["scales"], "numbers": numbers}
        return super().parameter(Packed(packed.shape, parts), dtype, transposed)


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
        return known and len(shape) == 2 and self.group_size % _AT_ONCE == 0 and shape[1] % self.group_size == 0


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
