"""bfloat16 weights in 12 bits, without losing one: exponents of a row of a trained weight lie in few octaves.

A weight is one byte of the upper plane (sign, a 4-bit code of the exponent, the upper 3 bits of the mantissa) and half
a byte of the lower plane (the other 4 bits of the mantissa). The exponent is the base of its row plus the code, 1 to
15; code and mantissa 0 are zero. Weights outside of these octaves are escapes: each lies in a list beside its row.
Weights in float32 whose lower 16 bits are zero, as a checkpoint in bfloat16 has them there, are such weights, too.

The upper plane by itself, half a step added, is the model in 8-bit floats, a draft that takes no memory: see `Upper`.
ZipServ (2603.17435) and DFloat11 (2504.11651) compress without loss by other codes, and do not draft with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from selfspec.formats.format import Format
from selfspec.formats.packed import (
    KernelLinear,
    Packed,
    PackedLinear,
    PackedWeight,
    UnsupportedWeightError,
    dense,
    fixed,
    some_rows,
)
from selfspec.formats.rounding import Kernels, in_rows, kernels_of
from selfspec.kernels import native

BLOCK = native.PLANES_BLOCK
# Octaves that codes of a row have.
_CODES = 15
# Columns fit into 16 bits of an escape.
_MOST_INPUTS = 1 << 16
# A weight with more escapes, 4 bytes each, takes more than in bfloat16.
_MOST_ESCAPES = 0.1
# Weights that are packed at once.
_AT_ONCE = 1 << 20
# Weights that are joined at once where rows are many: they stay in a device's cache.
_PANEL = 1 << 23


class PlanesLinear(KernelLinear):
    """Multiplies by a weight in planes, to the last bit as `selfspec.kernels.native.few_rows` by the dense weight."""

    def __init__(self, packed: Packed, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(packed, bias, dtype)
        self.upper, self.lower, self.rows, self.escapes = (fixed(packed[part]) for part in Planes.parts)

    @property
    def operands(self) -> native.Operands:
        return native.Operands(self.upper, (self.lower, self.rows, self.escapes), native.PLANES, self.in_features)

    def product(self, states: Tensor) -> Tensor:
        if kernels_of(self.upper.device) is Kernels.TRITON:
            return by_triton(states, self.rows_of, self.upper, self.rows, self.lower, self.escapes)
        return super().product(states)

    def rows_of(self, ids: Tensor) -> Tensor:
        if kernels_of(self.upper.device) is Kernels.TRITON:
            return rows_by_triton(self, ids, self.upper, self.rows, self.lower, self.escapes)
        return super().rows_of(ids)

    def decoded(self, numbers: Tensor) -> Tensor:
        bits = joined(self.upper[numbers], self.lower[numbers], self.rows[0][numbers])
        _put_escapes(bits, numbers, self.rows[1], self.escapes)
        return in_order(bits)[:, : self.in_features]


def by_triton(states: Tensor, join: Callable[[Tensor], Tensor], upper: Tensor, *parts: Tensor) -> Tensor:
    """Multiply states, `[..., in]` to `[..., out]`, in Triton; many rows by panels that `join` makes."""
    # Triton is not installed everywhere.
    from selfspec.kernels.triton_planes import MOST_ROWS, product_in_planes

    def product(rows: Tensor) -> Tensor:
        if len(rows) <= MOST_ROWS and not torch.is_autocast_enabled(rows.device.type):
            made: Tensor = product_in_planes(rows, upper, *parts)
            return made
        panels = torch.arange(len(upper), device=upper.device).split(max(1, _PANEL // upper.shape[1]))
        return torch.cat([functional.linear(rows, join(panel)) for panel in panels], -1)

    return in_rows(product, states)


def rows_by_triton(layer: PackedLinear, ids: Tensor, *parts: Tensor) -> Tensor:
    """Read rows of a weight, `[..., in]` in its dtype, by their numbers, `[...]`, in Triton."""
    from selfspec.kernels.triton_planes import rows_in_planes

    made = torch.bfloat16 if layer.dtype == torch.bfloat16 else torch.float32
    found: Tensor = rows_in_planes(layer.in_features, made, ids.flatten(), *parts)
    rounded: Tensor = found.to(layer.dtype)
    return rounded.view(*ids.shape, layer.in_features)


@dataclass(frozen=True)
class Planes(Format):
    """Keeps weights of bfloat16 precision exactly.

    `upper` and `lower` are bytes, `[out, blocks * 64]` and half as many; `rows`, `[2, out]` in int32, bases of the
    exponents and then how many escapes rows up to this one have; `escapes`, `[escapes]` in int32, the place of the byte
    in its row in the upper 16 bits and the weight in the lower ones. `selfspec/kernels/planes.h` says how blocks lie.
    Parts of a mixture's experts are stacked; their lists of escapes are as long as the longest.
    """

    name = "planes"
    help = "the same bits in 12 for each weight"
    bits = 12
    acceptance = 1.0
    parts = ("upper", "lower", "rows", "escapes")
    fetched = ("upper", "lower")
    layer: ClassVar[type[PlanesLinear]] = PlanesLinear
    exact = True
    copies = False

    def empty(self, shape: Sequence[int], device: torch.device) -> Packed:
        if not self.fits(shape):
            raise RuntimeError(f"{list(shape)}: planes keep two or three dimensions, with columns in 16 bits")
        *experts, outputs, inputs = shape
        padded = -(-inputs // BLOCK) * BLOCK
        parts = {
            "upper": torch.empty(*experts, outputs, padded, dtype=torch.uint8, device=device),
            "lower": torch.empty(*experts, outputs, padded // 2, dtype=torch.uint8, device=device),
            "rows": torch.empty(*experts, 2, outputs, dtype=torch.int32, device=device),
            "escapes": torch.empty(*experts, 0, dtype=torch.int32, device=device),
        }
        return Packed(torch.Size(shape), parts)

    def fits(self, shape: Sequence[int], device: torch.device | None = None) -> bool:
        return len(shape) in (2, 3) and shape[-1] < _MOST_INPUTS

    def joined_bytes(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> int:
        if kernels_of(device) is not Kernels.TRITON:
            return super().joined_bytes(shape, dtype, device)
        # Joined in bfloat16 or float32, and rounded where the dtype is another.
        made = dtype.itemsize if dtype in (torch.bfloat16, torch.float32) else 4 + dtype.itemsize
        return min(math.prod(shape[-2:]), _PANEL + shape[-1]) * made

    def check(self, packed: Packed) -> None:
        super().check(packed)
        ends, escapes = packed["rows"][..., 1, :], packed["escapes"]
        counts = ends.diff(prepend=torch.zeros_like(ends[..., :1]))
        lists = escapes.shape[:-1] == ends.shape[:-1] and escapes.shape[-1] >= ends[..., -1].max()
        if not lists or (counts < 0).any() or ((escapes >> 16 & 0xFFFF) >= packed["upper"].shape[-1]).any():
            raise UnsupportedWeightError("escapes are outside of its rows")

    @torch.no_grad()
    def pack(self, weight: Tensor) -> Packed:
        """Pack a weight, `[..., out, in]`, without losing a bit.

        Raises:
            UnsupportedWeightError: it has more bits than bfloat16 keeps, or takes no fewer bytes so.
        """
        weight = dense(weight.detach())
        if weight.ndim == 3:
            return _stacked([self.pack(each) for each in weight])
        packed = self.empty(weight.shape, weight.device)
        slices = some_rows(weight, _AT_ONCE)
        escapes = torch.cat([_split(bits_of(weight[some]), packed, some) for some in slices])
        if len(escapes) > _MOST_ESCAPES * weight.numel():
            share = len(escapes) / weight.numel()
            raise UnsupportedWeightError(f"{share:.0%} outside of the 15 octaves of its rows")
        packed["rows"][1].copy_(packed["rows"][1].cumsum(0))
        return Packed(packed.shape, {**packed.parts, "escapes": escapes})


def _stacked(experts: Sequence[Packed]) -> Packed:
    """Return the packed weights of experts as one; end lists of escapes with zeros, which no row has."""
    longest = max(len(each["escapes"]) for each in experts)
    ended = [functional.pad(each["escapes"], (0, longest - len(each["escapes"]))) for each in experts]
    lists = {part: [each[part] for each in experts] for part in Planes.parts} | {"escapes": ended}
    shape = torch.Size((len(experts), *experts[0].shape))
    return Packed(shape, {part: torch.stack(each) for part, each in lists.items()})


def bits_of(weight: Tensor) -> Tensor:
    """Return the bits of bfloat16 numbers, in int16. UnsupportedWeightError: the weight has more."""
    if weight.dtype == torch.bfloat16:
        return weight.contiguous().view(torch.int16)
    if weight.dtype == torch.float64 and torch.equal(weight.float().double(), weight):
        weight = weight.float()
    if weight.dtype != torch.float32:
        why = ", of which planes would save no bit; load it without packing" if weight.dtype == torch.float16 else ""
        raise UnsupportedWeightError(f"in {weight.dtype}{why}")
    lower, upper = weight.contiguous().view(torch.int16).unflatten(-1, (-1, 2)).unbind(-1)
    if lower.any():
        raise UnsupportedWeightError("in float32, with more bits than bfloat16")
    bits: Tensor = upper.contiguous()
    return bits


def _split(bits: Tensor, to: Packed, some: slice) -> Tensor:
    """Write planes of some rows, with their bases and numbers of escapes; return these, row by row."""
    exponents = bits >> 7 & 255
    finite = torch.where(exponents < 255, exponents, 0)
    bases = (finite.amax(1) - _CODES).clamp(0)
    # In the order of the kernel: see `planes.h`.
    bits = functional.pad(bits, (0, -bits.shape[1] % BLOCK)).unflatten(1, (-1, 2, 16)).mT.flatten(1)
    codes = (bits >> 7 & 255) - bases[:, None]
    escaped = ((codes < 1) | (codes > _CODES)) & (bits & 0x7FFF != 0)
    codes = torch.where((codes < 1) | escaped, 0, codes)
    places = escaped.nonzero()
    escapes = places[:, 1] << 16 | bits[escaped].long() & 0xFFFF
    lower = (bits & 15).unflatten(1, (-1, 2, 32))
    to["upper"][some] = (bits >> 8 & 0x80 | codes << 3 | bits >> 4 & 7).to(torch.uint8)
    to["lower"][some] = (lower[:, :, 0] | lower[:, :, 1] << 4).flatten(1).to(torch.uint8)
    to["rows"][:, some] = torch.stack([bases, escaped.sum(1)]).to(torch.int32)
    # The lower 32 bits: places reach the sign.
    return escapes.to(torch.int32)


def joined(upper: Tensor, lower: Tensor, bases: Tensor) -> Tensor:
    """Return bits of bfloat16 numbers, `[rows, blocks * 64]` in int16 and in the order of bytes, without escapes."""
    high, pairs = upper.to(torch.int16), lower.unflatten(1, (-1, 32)).to(torch.int16)
    low = torch.stack([pairs & 15, pairs >> 4], 2).flatten(1)
    sizes = (high & 0x7F) << 4 | low
    sizes = torch.where(sizes > 0, sizes + (bases[:, None] << 7).to(torch.int16), 0)
    return (high & 0x80) << 8 | sizes


def in_order(bits: Tensor) -> Tensor:
    """Return bfloat16 numbers, `[rows, blocks * 64]`, of bits in the order of bytes."""
    ordered: Tensor = bits.unflatten(1, (-1, 16, 2)).mT
    return ordered.flatten(1).view(torch.bfloat16)


def _put_escapes(found: Tensor, numbers: Tensor, ends: Tensor, escapes: Tensor) -> None:
    """Write the escapes of rows, by number, to their bits, in the order of bytes."""
    last = ends[numbers]
    first = torch.where(numbers > 0, ends[(numbers - 1).clamp(0)], 0)
    counts = (last - first).long()
    row = torch.arange(len(numbers), device=numbers.device).repeat_interleave(counts)
    place = torch.arange(len(row), device=numbers.device) - (counts.cumsum(0) - counts)[row] + first[row]
    taken = escapes[place]
    found[row, taken >> 16 & 0xFFFF] = taken.to(torch.int16)


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
