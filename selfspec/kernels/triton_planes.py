"""Multiply few rows by weights in planes on a CUDA device, and read rows of such weights, in Triton.

`planes.h` says how blocks of 64 weights lie. Here a word is four bytes of the upper plane: bytes 0 and 2 are weights
that lie side by side, bytes 1 and 3 those 16 further. A word of the lower plane belongs to one in each half of a block,
so a tile is four times as many pairs of bfloat16 numbers as it has lower words. Sizes alone decide the order of a sum,
and escapes stand where they belong before a tile is used: a product is that of the weight, whatever its planes are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from selfspec.kernels.triton_products import activated, one_of, place_of

MOST_ROWS = 64
"""Rows up to which a product takes less time than joining its weight does."""

# Rows of a program if there are several: the fewest that matrix units take.
_ROWS = 16
# Beyond every place of a row.
_NOWHERE = tl.constexpr(1 << 16)


@triton.jit
def _pairs(upper, lower, base, whole: tl.constexpr):
    """Return pairs of bfloat16 numbers: upper bytes are bits 8 to 15 and 24 to 31, lower ones 0 to 3 and 16 to 19."""
    signs = upper & 0x80008000
    sizes = (upper >> 4) & 0x07F007F0
    if whole:
        # All codes but 0 carry into bit 11.
        coded = ((sizes + 0x07800780) >> 4) & 0x00800080
        return (signs | sizes | (lower & 0x000F000F)) + coded * base
    return (signs | sizes | 0x00080008) + base * 0x00800080


@triton.jit
def _escape(escapes, following, end):
    """Return the next escape of rows, and its place, `_NOWHERE` after the last."""
    escape = tl.load(escapes + following, mask=following < end, other=0).to(tl.uint32, bitcast=True)
    return escape, tl.where(following < end, (escape >> 16).to(tl.int32), _NOWHERE)


@triton.jit
def _patched(pairs, word, number: tl.constexpr, escape, place):
    """Put an escape of each output into its pair, if it is among those of `number`."""
    byte = place % 4
    mine = (place // 32 % 2 * 2 + byte % 2 == number) & (place < _NOWHERE)
    at = tl.where(mine, place // 64 * 8 + place % 32 // 4, -1)
    weight = escape & 0xFFFF
    left = tl.where(byte < 2, 0xFFFF0000, 0x0000FFFF).to(tl.uint32)
    weight = tl.where(byte < 2, weight, weight << 16)
    return tl.where(word[None, :] == at[:, None], (pairs & left[:, None]) | weight[:, None], pairs)


@triton.jit
def _tile(
    upper,
    lower,
    escapes,
    output,
    inside,
    base,
    following,
    end,
    escape,
    place,
    word,
    words,
    whole: tl.constexpr,
    block: tl.constexpr,
):
    """Return four times `[outputs, block]` pairs, and the next escapes; pairs of a block of 64 lie 8, 8, 8 and 8."""
    there = inside[:, None] & (word < words)[None, :]
    at = upper + output[:, None] * (2 * words) + (word // 8 * 16 + word % 8)[None, :]
    first = tl.load(at, mask=there, other=0).to(tl.uint32, bitcast=True)
    second = tl.load(at + 8, mask=there, other=0).to(tl.uint32, bitcast=True)
    halves = first
    if whole:
        halves = tl.load(lower + output[:, None] * words + word[None, :], mask=there, other=0)
        halves = halves.to(tl.uint32, bitcast=True)
    base = base[:, None]
    pairs0 = _pairs(first << 8, halves, base, whole)
    pairs1 = _pairs(first, halves >> 8, base, whole)
    pairs2 = _pairs(second << 8, halves >> 4, base, whole)
    pairs3 = _pairs(second, halves >> 12, base, whole)
    if whole:
        last = (tl.min(word) + block) * 8
        while tl.min(place) < last:
            now = tl.where(place < last, place, _NOWHERE)
            pairs0 = _patched(pairs0, word, 0, escape, now)
            pairs1 = _patched(pairs1, word, 1, escape, now)
            pairs2 = _patched(pairs2, word, 2, escape, now)
            pairs3 = _patched(pairs3, word, 3, escape, now)
            following += (place < last).to(tl.int32)
            escape, place = _escape(escapes, following, end)
    return (pairs0, pairs1, pairs2, pairs3), following, escape, place


@triton.jit
def _numbers(pairs, dtype: tl.constexpr):
    """Return `[outputs, 2 block]` numbers of pairs, in bfloat16 or float32."""
    if dtype == tl.bfloat16:
        low = pairs.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = (pairs & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), (pairs.shape[0], 2 * pairs.shape[1]))


@triton.jit
def _columns(word, number: tl.constexpr, block: tl.constexpr):
    """Return the inputs that the numbers of a tile's pairs multiply, `[2 block]`, 16 of a block side by side."""
    first = tl.min(word) * 8
    weight = tl.arange(0, 2 * block)
    return first + weight // 16 * 64 + number * 16 + weight % 16


@triton.jit
def _row_of(rows, outputs, output, inside):
    """Return the base of rows, and their first escape and the one behind their last."""
    base = tl.load(rows + output, mask=inside, other=0).to(tl.uint32, bitcast=True)
    end = tl.load(rows + outputs + output, mask=inside, other=0)
    return base, tl.load(rows + outputs + output - 1, mask=inside & (output > 0), other=0), end


@triton.jit
def _sums(
    states,
    uppers,
    lowers,
    rows,
    escapes,
    which,
    row,
    output,
    count,
    outputs,
    inputs,
    words,
    whole: tl.constexpr,
    block: tl.constexpr,
):
    """Sum some outputs of some rows, `[rows, outputs]`, with one of several weights."""
    upper, lower = one_of(uppers, which), one_of(lowers, which)
    rows, escapes = one_of(rows, which), one_of(escapes, which)
    inside = output < outputs
    base, following, end = _row_of(rows, outputs, output, inside)
    escape, place = _escape(escapes, following, end)
    one: tl.constexpr = row.shape[0] == 1
    dtype: tl.constexpr = tl.float32 if one else states.dtype.element_ty
    total = tl.zeros((output.shape[0], 2 * block) if one else (row.shape[0], output.shape[0]), tl.float32)
    for first in range(0, words, block):
        word = first + tl.arange(0, block)
        tile, following, escape, place = _tile(
            upper, lower, escapes, output, inside, base, following, end, escape, place, word, words, whole, block
        )
        for number in tl.static_range(4):
            column = _columns(word, number, block)
            at = states + row.to(tl.int64)[:, None] * inputs + column[None, :]
            some = tl.load(at, mask=(row < count)[:, None] & (column < inputs)[None, :], other=0.0)
            weights = _numbers(tile[number], dtype)
            if one:
                total += some.to(tl.float32) * weights
            else:
                total = tl.dot(some, tl.trans(weights), total, input_precision="ieee")
    return tl.sum(total, 1)[None, :] if one else total


@triton.jit
def few_rows_in_planes(
    states,
    uppers,
    lowers,
    rows,
    escapes,
    product,
    count,
    outputs,
    every,
    inputs,
    blocks,
    whole: tl.constexpr,
    gate: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block: tl.constexpr,
):
    """Multiply `count` rows, `[count, inputs]`, to `[count, every]`; `blocks` are those of a row.

    There is one of each part, and of `outputs`, for each weight: they lie side by side in the product, or the first,
    activated by `gate`, is a factor of the second.
    """
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    which, output, start = place_of(outputs, tl.program_id(1), block_outputs)
    output += tl.arange(0, block_outputs)
    own = one_of(outputs, which)
    # So the compiler knows that a word of a plane never stands alone.
    words = blocks * 8
    found = _sums(states, uppers, lowers, rows, escapes, which, row, output, count, own, inputs, words, whole, block)
    if gate is not None:
        gated = activated(found, gate)
        found = gated * _sums(
            states, uppers, lowers, rows, escapes, 1, row, output, count, own, inputs, words, whole, block
        )
    tl.store(
        product + row.to(tl.int64)[:, None] * every + start + output[None, :],
        found.to(product.dtype.element_ty),
        mask=(row < count)[:, None] & (output < own)[None, :],
    )


@triton.jit
def join_row(
    ids,
    upper,
    lower,
    rows,
    escapes,
    joined,
    outputs,
    inputs,
    blocks,
    whole: tl.constexpr,
    block: tl.constexpr,
):
    """Write the row of each of `ids`, `[ids]` to `[ids, inputs]`; NaN: there is no such row."""
    output = tl.load(ids + tl.program_id(0) + tl.arange(0, 1)).to(tl.int64)
    inside = (output >= 0) & (output < outputs)
    # So the compiler knows that a word of a plane never stands alone.
    words = blocks * 8
    base, following, end = _row_of(rows, outputs, output, inside)
    escape, place = _escape(escapes, following, end)
    to = joined + tl.program_id(0).to(tl.int64) * inputs
    for first in range(0, words, block):
        word = first + tl.arange(0, block)
        tile, following, escape, place = _tile(
            upper, lower, escapes, output, inside, base, following, end, escape, place, word, words, whole, block
        )
        for number in tl.static_range(4):
            column = _columns(word, number, block)
            numbers = _numbers(tl.where(inside[:, None], tile[number], 0x7FFF7FFF), joined.dtype.element_ty)
            tl.store((to + column)[None, :], numbers, mask=(column < inputs)[None, :])


@custom_op("selfspec::few_rows_in_planes_by_triton", mutates_args=())
def product_in_planes(
    states: Tensor, upper: Tensor, rows: Tensor, lower: Tensor | None = None, escapes: Tensor | None = None
) -> Tensor:
    """Multiply rows, `[rows, in]` to `[rows, out]` in their dtype, by a weight in the parts of `formats.planes`.

    Without `lower` and `escapes` the upper plane is the weight, half a step added.
    """
    return joint_in_planes(states, [(upper, rows, lower, escapes)])


@product_in_planes.register_fake
def _(states: Tensor, upper: Tensor, *_: Tensor | None) -> Tensor:
    return states.new_empty(states.shape[0], upper.shape[0])


def joint_in_planes(states: Tensor, weights: Sequence[Sequence[Any]], gate: str | None = None) -> Tensor:
    """Multiply rows, `[rows, in]`, by several weights in planes in one launch: `[rows, sum of outputs]`.

    Weights are the arguments of `product_in_planes`, of all of them the same ones. With a `gate`, as in
    `triton_products.joint_product`, there are two, and the activated first product is a factor of the second.
    """
    # The matrix units have no float64 here, and float16 has fewer exponents than the weights.
    given = states.to(states.dtype if states.dtype == torch.bfloat16 else torch.float32).contiguous()
    uppers, lowers, rows, escapes = zip(*(_parts(*weight) for weight in weights), strict=True)
    count, outputs = len(states), tuple(len(each) for each in uppers)
    product = states.new_empty(count, outputs[0] if gate else sum(outputs))
    block_rows, block_outputs, block, warps = (1, 1, 128, 1) if count == 1 else (_ROWS, 32, 16, 4)
    programs = sum(triton.cdiv(each, block_outputs) for each in (outputs[:1] if gate else outputs))
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(states):
        few_rows_in_planes[triton.cdiv(count, block_rows), programs](
            *(given, uppers, lowers, rows, escapes, product, count, outputs),
            *(product.shape[1], states.shape[1], uppers[0].shape[1] // 16),
            whole=lowers[0] is not uppers[0],
            gate=gate,
            block_rows=block_rows,
            block_outputs=block_outputs,
            block=block,
            num_warps=warps,
            # Given, since Triton 3.9 warns if it is not.
            enable_fp_fusion=True,
        )
    return product


@custom_op("selfspec::rows_of_planes_by_triton", mutates_args=())
def rows_in_planes(
    inputs: int,
    dtype: torch.dtype,
    ids: Tensor,
    upper: Tensor,
    rows: Tensor,
    lower: Tensor | None = None,
    escapes: Tensor | None = None,
) -> Tensor:
    """Read rows by numbers, `[ids]` to `[ids, inputs]` in bfloat16 or float32; NaN: there is no such row."""
    joined = ids.new_empty(len(ids), inputs, dtype=dtype)
    with torch.cuda.device_of(ids):
        join_row[(len(ids),)](
            ids,
            *_parts(upper, rows, lower, escapes),
            joined,
            upper.shape[0],
            inputs,
            upper.shape[1] // 64,
            whole=lower is not None,
            block=128,
            num_warps=1,
            enable_fp_fusion=True,
        )
    return joined


@rows_in_planes.register_fake
def _(inputs: int, dtype: torch.dtype, ids: Tensor, *_: Tensor | None) -> Tensor:
    return ids.new_empty(len(ids), inputs, dtype=dtype)


def _parts(
    upper: Tensor, rows: Tensor, lower: Tensor | None = None, escapes: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the arguments of kernels, planes as words; a part that is missing is not read."""
    words = upper.view(torch.int32)
    return words, words if lower is None else lower.view(torch.int32), rows, rows if escapes is None else escapes
