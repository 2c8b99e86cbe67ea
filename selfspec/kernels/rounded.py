"""Weights rounded to 8 or 4 bits, with scales for rows or groups: the same on every machine, packed by no kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Weights that are rounded at once: copies of a whole head would take more memory than all substitutes.
_AT_ONCE = 1 << 17
# Times that scales and zeros are fitted to the levels that they gave: an eighth less squared error in 4 bits.
_FITS = 3
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Precision:
    """How weights of substitutes are kept.

    Attributes:
        bits: of a weight, 8 or 4.
        group_size: weights that share a scale, in 4 bits.
        source: the file that they are read from; None: they are rounded in memory.
    """

    bits: int
    group_size: int
    source: str | None = None


@dataclass(frozen=True)
class RoundedWeight:
    """A weight, `[..., out, in]`, in fewer bits.

    Attributes:
        levels: in 8 bits int8 in -127..127, `[..., out, in]`; in 4 bits uint8, `[..., out, in / 2]`, two levels of
            0..15 a byte, the first of them in the higher bits.
        scales: how far a level is from the next one, in bfloat16, as ATen's kernels take it: `[..., out]` in 8 bits,
            `[..., out, groups]` in 4.
        zeros: the value of level 8 in 4 bits, laid out as the scales; None in 8 bits, where level 0 is 0.
    """

    levels: Tensor
    scales: Tensor
    zeros: Tensor | None

    @classmethod
    def empty(cls, shape: Sequence[int], precision: Precision, device: torch.device) -> RoundedWeight:
        """One without values yet, for a weight of `shape`.

        Raises:
            RuntimeError: groups do not divide the inputs.
        """
        *outputs, inputs = shape
        if precision.bits == 8:
            levels = torch.empty(*outputs, inputs, dtype=torch.int8, device=device)
            return cls(levels, torch.empty(*outputs, dtype=torch.bfloat16, device=device), None)
        if inputs % precision.group_size:
            raise RuntimeError(f"{inputs} inputs: groups of {precision.group_size} do not divide them")
        levels = torch.empty(*outputs, inputs // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(*outputs, inputs // precision.group_size, dtype=torch.bfloat16, device=device)
        return cls(levels, scales, torch.empty_like(scales))

    def __getitem__(self, which: int | slice) -> RoundedWeight:
        """A view of some of the weights, or of some rows of one."""
        return RoundedWeight(self.levels[which], self.scales[which], None if self.zeros is None else self.zeros[which])

    @property
    def inputs(self) -> int:
        """Of the layer."""
        return self.levels.shape[-1] if self.zeros is None else 2 * self.levels.shape[-1]

    @property
    def parts(self) -> dict[str, Tensor]:
        """Its tensors, by name."""
        parts = {"levels": self.levels, "scales": self.scales, "zeros": self.zeros}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(part.nbytes for part in self.parts.values())

    def copy_(self, other: RoundedWeight) -> None:
        """Take the values of another."""
        for name, part in self.parts.items():
            part.copy_(other.parts[name])


@torch.no_grad()
def round_weight(weight: Tensor, precision: Precision) -> RoundedWeight:
    """Round a weight, `[..., out, in]`: in 8 bits by its largest value, in 4 bits with little squared error.

    Raises:
        RuntimeError: groups do not divide `in`.
    """
    rounded = RoundedWeight.empty(weight.shape, precision, weight.device)
    _fill(rounded, weight.detach(), precision)
    return rounded


def _fill(rounded: RoundedWeight, weight: Tensor, precision: Precision) -> None:
    if weight.ndim > 2:
        for index, part in enumerate(weight):
            _fill(rounded[index], part, precision)
        return
    step = max(1, _AT_ONCE // weight.shape[1])
    for first in range(0, weight.shape[0], step):
        some = slice(first, first + step)
        rows = weight[some].float()
        rounded[some].copy_(_eight_bits(rows) if precision.bits == 8 else four_bits(rows, precision.group_size))


# Scales are rounded first, and the weights to multiples of what the kernels will use.


def _eight_bits(weight: Tensor) -> RoundedWeight:
    scales = _as_kept(weight.abs().amax(1) / 127)
    levels = (weight / scales.float()[:, None]).round_().clamp_(-127, 127)
    return RoundedWeight(levels.to(torch.int8), scales, None)


def four_bits(weight: Tensor, group_size: int) -> RoundedWeight:
    """Round a float32 weight, `[out, in]`, with scales and zeros that are fitted to what they give."""
    groups = weight.unflatten(1, (-1, group_size))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = _as_kept((high - low) / 15)
    zeros = (low + 8 * scales.float()).to(torch.bfloat16)
    levels = nearest_levels(groups, scales, zeros)
    for _ in range(_FITS):
        # The line through levels and weights with the least squared error; where all levels are one, their mean.
        mean = levels.mean(-1, keepdim=True)
        apart = levels - mean
        spread = apart.square().sum(-1, keepdim=True)
        slope = (apart * groups).sum(-1, keepdim=True) / spread
        scales = torch.where(spread > 0, _as_kept(slope), scales)
        zeros = (groups.mean(-1, keepdim=True) + (8 - mean) * scales.float()).to(torch.bfloat16)
        levels = nearest_levels(groups, scales, zeros)
    return RoundedWeight(in_pairs(levels.flatten(1)), scales[..., 0], zeros[..., 0])


def in_pairs(levels: Tensor) -> Tensor:
    """Levels of 4 bits, `[out, in]`, two a byte."""
    pairs: Tensor = levels.to(torch.uint8).unflatten(1, (-1, 2))
    packed: Tensor = pairs[..., 0] << 4 | pairs[..., 1]
    return packed


def _as_kept(scales: Tensor) -> Tensor:
    return scales.clamp(min=_SMALLEST).to(torch.bfloat16)


def nearest_levels(weights: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The levels of 4 bits that are nearest to weights, in float32; scales and zeros are broadcast."""
    levels: Tensor = ((weights - zeros.float()) / scales.float() + 8).round_().clamp_(0, 15)
    return levels
