"""Move slots of a cache on a CUDA device, in Triton: those of all layers in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.device import to_device
from selfspec.kernels.trial import Trial

# Slots are moved as integers, so that no bit changes.
_UNITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_TRIAL = Trial("slots of committed paths")


@triton.jit
def move_slots(
    like, addresses, sources, targets, heads, row_stride, head_stride, count, width: tl.constexpr, block: tl.constexpr
):
    """Move slots of one row and head of the tensor at an address, one after the other, as `slots_moved` says.

    `like` gives the dtype, and is not read; strides count numbers. `block` is a power of two, at least `width`.
    """
    row, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    inner = tl.arange(0, block)
    start = tl.load(addresses + tl.program_id(0)).to(like.dtype) + row * row_stride + head * head_stride + inner
    # A slot is overwritten only after it was moved, and each thread moves its own numbers of all slots.
    for place in range(count):
        source = tl.load(sources + row * count + place)
        target = tl.load(targets + row * count + place)
        tl.store(start + target * width, tl.load(start + source * width, mask=inner < width), mask=inner < width)


def moved_at_once(parts: Sequence[Tensor], sources: Tensor, targets: Tensor) -> bool:
    """Move slots as `slots_moved` does, unless the kernel failed an earlier trial; return whether they were moved."""
    kind = (sources.device, *sorted({str(part.dtype) for part in parts}))
    trusted = _TRIAL.known(kind)
    if trusted is not None:
        if trusted:
            slots_moved(parts, sources, targets)
        return trusted
    rows = torch.arange(len(sources), device=sources.device)[:, None]
    expected = [part[rows, :, sources] for part in parts]

    def moved() -> Tensor:
        slots_moved(parts, sources, targets)
        return _side_by_side([part[rows, :, targets] for part in parts])

    if not _TRIAL.passes(kind, moved, _side_by_side(expected), most=0.0):
        for part, slots in zip(parts, expected, strict=True):
            part[rows, :, targets] = slots
    return True


def slots_moved(parts: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Move slots of each row in tensors `[batch, heads, slots, width]`; the numbers of a head's slots are contiguous.

    Slots are `[batch, count]`: sources in rising order, except slots that stay, and targets, none behind its source.
    """
    for _, alike in groupby(sorted(parts, key=_layout), key=_layout):
        tensors = list(alike)
        first = tensors[0]
        batch, heads, _, width = first.shape
        addresses = to_device([tensor.data_ptr() for tensor in tensors], first.device)
        # Triton launches on the current device, whatever its arguments are on.
        with torch.cuda.device_of(first):
            move_slots[len(tensors), batch * heads](
                first.view(_UNITS[first.element_size()]),
                addresses,
                sources.contiguous(),
                targets.contiguous(),
                heads,
                first.stride(0),
                first.stride(1),
                sources.shape[1],
                width=width,
                block=triton.next_power_of_2(width),
                num_warps=1,
                enable_fp_fusion=True,
            )


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.double().flatten() for part in parts])


def _layout(part: Tensor) -> tuple[int, ...]:
    return (part.element_size(), *part.shape, *part.stride())
