"""Compute products of few rows with weights in 8 and 4 bits on a CUDA device, in Triton.

Each weight is read once for up to sixteen rows, of any dtype. Sizes alone decide the order in which an output is
summed, so a seed gives the same tokens in every process: nothing is tuned at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

# Rows of a program if there are several: the fewest that matrix units take.
_ROWS = 16


@dataclass(frozen=True)
class _Blocks:
    """Divides a product into programs: outputs of each, bytes of an output read together, warps, and stages."""

    outputs: int
    width: int
    warps: int
    stages: int


# By bits, and whether there is one row: the fastest of 23 choices, over four shapes of 1B and 8B models on an H100.
_BLOCKS = {
    (8, True): _Blocks(4, 512, 4, 3),
    (8, False): _Blocks(32, 128, 4, 4),
    (4, True): _Blocks(4, 256, 4, 3),
    (4, False): _Blocks(32, 128, 4, 4),
}


@triton.jit
def _add_product(total, states, weights, block_rows: tl.constexpr):
    """Add `[rows, bytes]` times `[outputs, bytes]`; for one row elementwise, with a total of `[outputs, bytes]`."""
    if block_rows == 1:
        total += states.to(tl.float32) * weights.to(tl.float32)
    else:
        total = tl.dot(states, tl.trans(weights.to(states.dtype)), total)
    return total


@triton.jit
def _unpacked(
    levels, scales, zeros, outputs, inside, first, groups, group_bytes: tl.constexpr, block_bytes: tl.constexpr
):
    """Return the values of levels of 4 bits, `[outputs, bytes]`, in groups of `group_bytes` bytes."""
    group = first // group_bytes + tl.arange(0, block_bytes // group_bytes)
    at = outputs[:, None] * groups + group[None, :]
    there = inside[:, None] & (group < groups)[None, :]
    shape: tl.constexpr = (levels.shape[0], block_bytes // group_bytes, group_bytes)
    scale = tl.load(scales + at, mask=there, other=0.0).to(tl.float32)
    zero = tl.load(zeros + at, mask=there, other=0.0).to(tl.float32)
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], shape), levels.shape)
    zero = tl.reshape(tl.broadcast_to(zero[:, :, None], shape), levels.shape)
    return (levels.to(tl.float32) - 8.0) * scale + zero


@triton.jit
def _scaled(states, factors, inside):
    """Multiply states, `[rows, bytes]`, by the factors of their inputs; round to the dtype of states."""
    factor = tl.load(factors, mask=inside, other=0.0)
    return (states.to(tl.float32) * factor[None, :]).to(states.dtype)


@triton.jit
def few_rows(
    states,
    factors,
    levels,
    scales,
    zeros,
    product,
    rows,
    outputs,
    width,
    group_bytes: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_bytes: tl.constexpr,
):
    """Compute some outputs of some rows, `[rows, in]` times `factors`, `[in]`, to `[rows, outputs]`.

    `levels` are `[outputs, width]`, bytes: a level each, or two, the first in the higher bits. In 8 bits `group_bytes`
    is 0, and `scales` are `[outputs]`; in 4 bits it is the bytes that share a scale, and `scales` and `zeros` are
    `[outputs, groups]`.
    """
    output = (tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)).to(tl.int64)
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    byte = tl.arange(0, block_bytes)
    inside = output < outputs
    # A byte holds one input or two.
    each: tl.constexpr = 1 if group_bytes == 0 else 2
    total = tl.zeros((block_outputs, block_bytes) if block_rows == 1 else (block_rows, block_outputs), tl.float32)
    for first in range(0, width, block_bytes):
        read = first + byte
        weights = tl.load(
            levels + output[:, None] * width + read[None, :], mask=inside[:, None] & (read < width)[None, :], other=0
        )
        at = states + row[:, None] * (width * each) + read[None, :] * each
        there = (row < rows)[:, None] & (read < width)[None, :]
        factor = factors + read * each
        some = _scaled(tl.load(at, mask=there, other=0.0), factor, read < width)
        if group_bytes == 0:
            total = _add_product(total, some, weights, block_rows)
        else:
            groups = width // group_bytes
            high = _unpacked(weights >> 4, scales, zeros, output, inside, first, groups, group_bytes, block_bytes)
            total = _add_product(total, some, high, block_rows)
            low = _unpacked(weights & 15, scales, zeros, output, inside, first, groups, group_bytes, block_bytes)
            more = _scaled(tl.load(at + 1, mask=there, other=0.0), factor + 1, read < width)
            total = _add_product(total, more, low, block_rows)
    found = tl.sum(total, 1)[None, :] if block_rows == 1 else total
    if group_bytes == 0:
        found *= tl.load(scales + output, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(
        product + row[:, None] * outputs + output[None, :],
        found.to(product.dtype.element_ty),
        mask=(row < rows)[:, None] & inside[None, :],
    )


@custom_op("selfspec::few_rows_by_triton", mutates_args=())
def low_bits_product(states: Tensor, factors: Tensor, levels: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Multiply rows, `[rows, in]` to `[rows, out]` in their dtype, by `factors`, `[in]`, and a weight in few bits.

    In 8 bits `levels` are `[out, in]`, int8, and `scales` `[out]`. In 4 bits `levels` are `[out, in / 2]`, uint8, the
    first of two in the higher bits, and `scales` and `zeros`, the values of level 8, are `[out, groups]`; the size of a
    group is a power of two.
    """
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(states):
        return _launched(states, factors, levels, scales, zeros)


@low_bits_product.register_fake
def _(states: Tensor, _: Tensor, levels: Tensor, *__: Tensor | None) -> Tensor:
    return states.new_empty(states.shape[0], levels.shape[0])


def _launched(states: Tensor, factors: Tensor, levels: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    dtype = states.dtype
    # The matrix units have no float64 here.
    states = states.to(torch.float32 if dtype == torch.float64 else dtype).contiguous()
    rows, (outputs, width) = states.shape[0], levels.shape
    product = states.new_empty(rows, outputs, dtype=dtype)
    blocks = _BLOCKS[8 if zeros is None else 4, rows == 1]
    of_program = 1 if rows == 1 else _ROWS
    few_rows[triton.cdiv(outputs, blocks.outputs), triton.cdiv(rows, of_program)](
        states,
        factors,
        levels,
        scales,
        scales if zeros is None else zeros,
        product,
        rows,
        outputs,
        width,
        group_bytes=0 if zeros is None else width // scales.shape[1],
        block_rows=of_program,
        block_outputs=blocks.outputs,
        block_bytes=blocks.width,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        # Given, since Triton 3.9 warns if it is not.
        enable_fp_fusion=True,
    )
    return product
