"""Round weights to 8 or 4 bits, with scales for rows or groups, the same on every machine and not packed for a kernel.

Columns of different sizes lower the acceptance rate in few bits. So each column is first divided by a factor, and its
input multiplied by it, as in SmoothQuant (Xiao et al., 2023) and AWQ (Lin et al., 2024), whose factors need data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Weights that are rounded at once: copies of a whole head would take more memory than all substitutes.
_AT_ONCE = 1 << 17
# Times that scales and zeros are fitted to their levels: this lowers the squared error by an eighth in 4 bits.
_FITS = 3
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Precision:
    """The precision in which weights of substitutes are kept.

    Attributes:
        bits: bits of a weight, 8 or 4.
        group_size: number of weights that share a scale, in 4 bits.
        source: the file that weights are read from; None: they are rounded in memory.
    """

    bits: int
    group_size: int
    source: str | None = None


@dataclass(frozen=True)
class RoundedWeight:
    """A weight, `[..., out, in]`, in fewer bits, for inputs that are first multiplied by `factors`.

    Attributes:
        levels: in 8 bits int8 in -127..127, `[..., out, in]`; in 4 bits uint8, `[..., out, in / 2]`, two levels of
            0..15 in a byte, the first in the higher bits.
        scales: the distance between two levels, in bfloat16, as ATen's kernels take it: `[..., out]` in 8 bits,
            `[..., out, groups]` in 4.
        factors: factors of the inputs, `[..., in]`, float32, by which columns are divided. Columns of zeros have 0: 4
            bits do not hold a zero, and inputs that nothing reads may be large.
        zeros: the value of level 8 in 4 bits, laid out as the scales; None in 8 bits, where level 0 is 0.
    """

    levels: Tensor
    scales: Tensor
    factors: Tensor
    zeros: Tensor | None

    @classmethod
    def empty(cls, shape: Sequence[int], precision: Precision, device: torch.device) -> RoundedWeight:
        """Make a rounded weight without values, for a weight of `shape`.

        Raises:
            RuntimeError: the number of inputs is not a multiple of the group size.
        """
        *outputs, inputs = shape
        factors = torch.empty(*outputs[:-1], inputs, dtype=torch.float32, device=device)
        if precision.bits == 8:
            levels = torch.empty(*outputs, inputs, dtype=torch.int8, device=device)
            return cls(levels, torch.empty(*outputs, dtype=torch.bfloat16, device=device), factors, None)
        if inputs % precision.group_size:
            raise RuntimeError(f"{inputs} inputs: groups of {precision.group_size} do not divide them")
        levels = torch.empty(*outputs, inputs // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(*outputs, inputs // precision.group_size, dtype=torch.bfloat16, device=device)
        return cls(levels, scales, factors, torch.empty_like(scales))

    def __getitem__(self, which: int | slice) -> RoundedWeight:
        """Return a view of some of the weights, or of some rows of one weight."""
        zeros = None if self.zeros is None else self.zeros[which]
        factors = self.factors if self.levels.ndim == 2 else self.factors[which]
        return RoundedWeight(self.levels[which], self.scales[which], factors, zeros)

    @property
    def inputs(self) -> int:
        """Number of inputs of the layer."""
        return self.levels.shape[-1] if self.zeros is None else 2 * self.levels.shape[-1]

    @property
    def parts(self) -> dict[str, Tensor]:
        """Tensors of the weight, by name."""
        parts = {"levels": self.levels, "scales": self.scales, "factors": self.factors, "zeros": self.zeros}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all these tensors."""
        return sum(part.nbytes for part in self.parts.values())


@torch.no_grad()
def round_weight(weight: Tensor, precision: Precision, factors: Tensor | None = None) -> RoundedWeight:
    """Round a weight, `[..., out, in]`: in 8 bits by its largest value, in 4 bits with little squared error.

    `factors`, `[..., in]`, are those of its inputs; None: the sizes of its columns, which is right where inputs are
    smaller in proportion as their columns are larger, as layers learn them.

    Raises:
        RuntimeError: `in` is not a multiple of the group size.
    """
    rounded = RoundedWeight.empty(weight.shape, precision, weight.device)
    rounded.factors.copy_(column_sizes(weight.detach()) if factors is None else factors)
    _fill(rounded, weight.detach(), precision)
    return rounded


def round_head(weight: Tensor, precision: Precision) -> RoundedWeight:
    """Round a head over a vocabulary, `[out, in]`, as `round_weight`: its large columns read inputs of any size."""
    return round_weight(weight, precision, torch.ones(weight.shape[-1], device=weight.device))


def _fill(rounded: RoundedWeight, weight: Tensor, precision: Precision) -> None:
    if weight.ndim > 2:
        for index, part in enumerate(weight):
            _fill(rounded[index], part, precision)
        return
    for some in _pieces(weight):
        rows, part = evened(weight[some], rounded.factors), rounded[some]
        if part.zeros is None:
            _fill_eight_bits(part, rows)
        else:
            grid = four_bits(rows, precision.group_size)
            part.levels.copy_(in_pairs(grid.levels))
            part.scales.copy_(grid.scales)
            part.zeros.copy_(grid.zeros)


def _pieces(weight: Tensor) -> Iterator[slice]:
    step = max(1, _AT_ONCE // weight.shape[1])
    return (slice(first, first + step) for first in range(0, weight.shape[0], step))


def column_sizes(weight: Tensor) -> Tensor:
    """Return the root mean square of each column of a weight, `[..., out, in]`, divided by their mean: `[..., in]`."""
    if weight.ndim > 2:
        return torch.stack([column_sizes(part) for part in weight])
    # In float64, so that the result does not depend on how the sum is split.
    squares = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
    for some in _pieces(weight):
        squares += weight[some].double().square().sum(0)
    sizes = squares.sqrt()
    return (sizes / sizes.mean().clamp(min=_SMALLEST)).float()


def evened(weight: Tensor, factors: Tensor) -> Tensor:
    """Divide the columns of a weight, `[out, in]`, by their factors, in float32."""
    return weight.float() / factors.clamp(min=_SMALLEST)


# Scales are rounded first, so that weights are rounded with the scales that the kernels use.


def _fill_eight_bits(rounded: RoundedWeight, weight: Tensor) -> None:
    rounded.scales.copy_(_as_kept(weight.abs().amax(1) / 127))
    rounded.levels.copy_((weight / rounded.scales.float()[:, None]).round_().clamp_(-127, 127))


@dataclass(frozen=True)
class FourBits:
    """A weight, `[out, in]`, rounded to 4 bits.

    Attributes:
        levels: 0 to 15, `[out, in]`.
        scales: `[out, groups]`, in bfloat16.
        zeros: the value of level 8, laid out as the scales.
    """

    levels: Tensor
    scales: Tensor
    zeros: Tensor


def four_bits(weight: Tensor, group_size: int) -> FourBits:
    """Round a float32 weight, `[out, in]`, with scales and zeros fitted to the levels."""
    groups = weight.unflatten(1, (-1, group_size))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = _as_kept((high - low) / 15)
    zeros = (low + 8 * scales.float()).to(torch.bfloat16)
    levels = nearest_levels(groups, scales, zeros)
    for _ in range(_FITS):
        # Fit a line of weights by levels with the least squared error; if all levels are equal, use the mean.
        mean = levels.mean(-1, keepdim=True)
        apart = levels - mean
        spread = apart.square().sum(-1, keepdim=True)
        slope = (apart * groups).sum(-1, keepdim=True) / spread
        scales = torch.where(spread > 0, _as_kept(slope), scales)
        zeros = (groups.mean(-1, keepdim=True) + (8 - mean) * scales.float()).to(torch.bfloat16)
        levels = nearest_levels(groups, scales, zeros)
    return FourBits(levels.flatten(1), scales[..., 0], zeros[..., 0])


def in_pairs(levels: Tensor) -> Tensor:
    """Pack levels of 4 bits, `[out, in]`, two in a byte."""
    pairs: Tensor = levels.to(torch.uint8).unflatten(1, (-1, 2))
    packed: Tensor = pairs[..., 0] << 4 | pairs[..., 1]
    return packed


def _as_kept(scales: Tensor) -> Tensor:
    return scales.clamp(min=_SMALLEST).to(torch.bfloat16)


def nearest_levels(weights: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Return the nearest levels of 4 bits for weights, in float32; scales and zeros are broadcast."""
    levels: Tensor = ((weights - zeros.float()) / scales.float() + 8).round_().clamp_(0, 15)
    return levels
