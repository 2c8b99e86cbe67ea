"""Weights in fewer bits, made plain again."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.formats.packed import Packed


def restored(weight: Packed) -> Tensor:
    """The weight that a kernel multiplies by, inputs' factors and all."""
    scales, factors = weight["scales"].float()[..., None], weight["factors"][..., None, :]
    if "zeros" not in weight.parts:
        return weight["levels"] * scales * factors
    levels = (
        torch.stack([weight["levels"] >> 4, weight["levels"] & 15], -1)
        .flatten(-2)
        .unflatten(-1, (scales.shape[-2], -1))
    )
    evened: Tensor = ((levels.float() - 8) * scales + weight["zeros"].float()[..., None]).flatten(-2)
    return evened * factors
