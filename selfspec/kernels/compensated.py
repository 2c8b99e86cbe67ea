"""Weights in 4 bits whose rounding errors make up for each other on given inputs: GPTQ (Frantar et al., 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.kernels.rounded import (
    Precision,
    RoundedWeight,
    column_sizes,
    evened,
    four_bits,
    in_pairs,
    nearest_levels,
    round_weight,
)

# Of the mean second moment. No moment exceeds their sum, so it bounds the condition, and float32 is enough.
_DAMPING = 0.05
# Weights that are rounded at once: copies of them are made in float32.
_AT_ONCE = 1 << 24
# Of a mean input: factors of smaller ones are those of such.
_LEAST_INPUT = 1e-3


@torch.no_grad()
def round_compensated(weight: Tensor, moments: Tensor, precision: Precision) -> RoundedWeight:
    """Round a weight to 4 bits, input by input: the inputs still to come take up the error of those before.

    Args:
        weight: `[out, in]`.
        moments: `x^T x` over inputs `x` of the layer, `[in, in]`, float32. Without any inputs, or where they are not
            finite, scales alone are fitted.
        precision: 4 bits.

    Raises:
        RuntimeError: groups do not divide `in`.
    """
    mean = moments.diagonal().mean()
    if not (mean > 0 and mean.isfinite()):
        return round_weight(weight, precision)
    rounded = RoundedWeight.empty(weight.shape, precision, weight.device)
    rounded.factors.copy_(_factors(weight, moments))
    moments = moments * rounded.factors * rounded.factors[:, None]
    effects = _effects(moments, _DAMPING * moments.diagonal().mean())
    step = max(1, _AT_ONCE // weight.shape[1])
    for first in range(0, weight.shape[0], step):
        some = slice(first, first + step)
        # A copy, however the weight is laid out.
        left = evened(weight[some], rounded.factors).t().contiguous()
        _fill(rounded[some], left, effects, precision.group_size)
    return rounded


def _factors(weight: Tensor, moments: Tensor) -> Tensor:
    """Those that leave inputs and columns, `[in]`, of the same size."""
    inputs = moments.diagonal().sqrt()
    return (column_sizes(weight) / (inputs / inputs.mean()).clamp(min=_LEAST_INPUT)).sqrt()


def _effects(moments: Tensor, damping: Tensor) -> Tensor:
    """The upper triangular U of which U^T U inverts the damped moments: row i is what input i does to later ones."""
    damped = moments + damping * torch.eye(len(moments), device=moments.device)
    root = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    effects: Tensor = torch.linalg.solve_triangular(root, torch.eye(len(root), device=root.device), upper=True)
    return effects


def _fill(rounded: RoundedWeight, left: Tensor, effects: Tensor, group_size: int) -> None:
    """Round some outputs; `left`, `[in, out]`, is overwritten by what is left to round after each input."""
    assert rounded.zeros is not None
    for group in range(rounded.scales.shape[1]):
        first, end = group * group_size, (group + 1) * group_size
        fitted = four_bits(left[first:end].t(), group_size)
        scales, zeros = fitted.scales[:, 0].float(), fitted.zeros[:, 0].float()
        levels, errors = torch.empty_like(left[first:end]), torch.empty_like(left[first:end])
        for place, number in enumerate(range(first, end)):
            levels[place] = nearest_levels(left[number], scales, zeros)
            errors[place] = (left[number] - (levels[place] - 8) * scales - zeros) / effects[number, number]
            left[number + 1 : end].addr_(effects[number, number + 1 : end], errors[place], alpha=-1)
        left[end:].addmm_(effects[first:end, end:].t(), errors, alpha=-1)
        rounded.levels[:, first // 2 : end // 2] = in_pairs(levels.t())
        rounded.scales[:, group], rounded.zeros[:, group] = fitted.scales[:, 0], fitted.zeros[:, 0]
