"""Compute products of few rows with weights in 8 and 4 bits on a CUDA device, in Triton.

Weights are read once for up to sixteen rows, of any dtype, as words of 32 bits: four levels of 8 bits, in order, or
eight of 4 bits, the first in the lowest bits. In 4 bits a block of 128 inputs is 16 words, and word w has the inputs
from 32 (w % 4) + 8 (w // 4) on: four words that lie side by side, which a thread reads at once, hold 8 inputs of each
32, so that threads side by side read states side by side. Sizes alone decide the order in which an output is summed, so
a seed gives the same tokens in every process: nothing is tuned at run time.
"""

# Triton has no starred tuples.
# ruff: noqa: RUF005

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

# Rows of a program if there are several: the fewest that matrix units take.
_ROWS = 16
# Outputs of a program over several rows, words of each that it reads at once, and how often before they are needed.
_OUTPUTS, _WORDS, _STAGES = 32, {8: 32, 4: 8}, {8: 4, 4: 6}
# Warps of a program over one row, by bits; each reads 128 words of each of 8 outputs at once.
_WARPS = {8: 4, 4: 2}
# Programs that keep a device busy, and the fewest reads in a row that a program should have.
_PROGRAMS, _READS = 128, 8


@triton.jit
def _four(tile):
    """Split a tile, `[threads, 4]`."""
    even, odd = tl.split(tl.reshape(tile, (tile.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _split(tile):
    """Split a tile, `[threads, 4 or 8]`."""
    if tile.shape[1] == 4:
        found = _four(tile)
    else:
        low, high = tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, 4)), (0, 2, 1)))
        found = _four(low) + _four(high)
    return found


@triton.jit
def _number(word, nothing, place: tl.constexpr, bits: tl.constexpr):
    """Make a float32 number of a level, which is too large by `_too_large`: the level is the end of its mantissa."""
    if bits == 8:
        up: tl.constexpr = 15 - 8 * place
        mask: tl.constexpr = 0x7F8000
        # 256, and the other sign.
        number: tl.constexpr = 0x43C00000
    else:
        # Two levels share a shift.
        up: tl.constexpr = (12 if place % 3 == 0 else 16) - 4 * place
        mask: tl.constexpr = 0xF000 if place % 3 == 0 else 0xF0000
        # 2048 or 128.
        number: tl.constexpr = 0x45000000 if place % 3 == 0 else 0x43000000
    word = word << up if up >= 0 else word >> -up
    return ((word & (nothing | mask)) ^ number).to(tl.float32, bitcast=True)


@triton.jit
def _too_large(some, sum, part: tl.constexpr, bits: tl.constexpr):
    """Return the excess of a product of states with `_number`s, given the `sum` of the states."""
    if bits == 8:
        found = 384.0 * sum
    else:
        found = 136.0 * sum + 1920.0 * (some[8 * part] + some[8 * part + 3] + some[8 * part + 6])
    return found


@triton.jit
def _in_pairs(sums):
    """Add up numbers two by two."""
    found = ()
    for number in tl.static_range(len(sums) // 2):
        found = found + (sums[2 * number] + sums[2 * number + 1],)
    return found


@triton.jit
def _groups(units, group: tl.constexpr):
    """Return the number of groups of a row of blocks of 128 inputs."""
    return units * (128 // group) if group <= 128 else units // (group // 128)


@triton.jit
def _group(word, group: tl.constexpr):
    """Return the groups that words are of."""
    number = word // 16 * 4 + word % 4
    return number if group == 32 else number // (group // 32)


@triton.jit
def _scale_and_zero(pair):
    """Return two bfloat16 numbers that lie in a word."""
    return (pair << 16).to(tl.float32, bitcast=True), (pair & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def one_row(
    states,
    factors,
    levels,
    scales,
    product,
    outputs,
    inputs,
    units,
    group: tl.constexpr,
    bits: tl.constexpr,
    threads: tl.constexpr,
):
    """Compute eight outputs of one row; arguments are as in `few_rows`.

    A thread reads four words of each output and the states that they multiply, and nothing of another thread: the sums
    of threads are added up at the end.
    """
    output = tl.program_id(0).to(tl.int64) * 8
    thread = tl.arange(0, threads)
    # Of states: those that take 16 bytes.
    wide: tl.constexpr = 8 if states.dtype.element_ty.primitive_bitwidth == 16 else 4
    # So the compiler knows that a word never stands alone.
    words = units * (4 if bits == 8 else 16)
    # Zero, which the compiler does not know: so it keeps masks in registers, and one instruction applies them.
    nothing = (units >> 31).to(tl.uint32)
    totals = ()
    for _ in tl.static_range(8):
        totals = totals + (tl.zeros((threads,), tl.float32),)
    whole = tl.zeros((threads,), tl.float32)
    for first in range(0, words, 4 * threads):
        word = first + thread * 4
        some = ()
        sums = ()
        for part in tl.static_range(128 // bits // wide):
            if bits == 8:
                column = word * 4 + part * wide
            else:
                column = word // 16 * 128 + word // 4 % 4 * 8 + part * wide // 8 * 32 + part * wide % 8
            column = column[:, None] + tl.arange(0, wide)[None, :]
            state = tl.load(states + column, mask=column < inputs, other=0.0).to(tl.float32)
            state *= tl.load(factors + column, mask=column < inputs, other=0.0)
            some = some + _split(state)
            sums = sums + (tl.sum(state, 1),)
        if wide == 4:
            sums = _in_pairs(sums)
        if bits == 8:
            whole += sums[0] + sums[1]
        four = word[:, None] + tl.arange(0, 4)[None, :]
        there = four < words
        more = ()
        for number in tl.static_range(8):
            row = tl.minimum(output + number, outputs - 1)
            read = _four(tl.load(levels + row * words + four, mask=there, other=0).to(tl.uint32, bitcast=True))
            total = totals[number]
            if bits == 8:
                for place in tl.static_range(16):
                    total += some[place] * _number(read[place // 4], nothing, place % 4, 8)
            else:
                at = scales + row * _groups(units, group) + _group(four, group)
                pairs = _four(tl.load(at, mask=there, other=0).to(tl.uint32, bitcast=True))
                for part in tl.static_range(4):
                    found = -_too_large(some, sums[part], part, 4)
                    for place in tl.static_range(8):
                        found += some[8 * part + place] * _number(read[part], 0, place, 4)
                    scale, zero = _scale_and_zero(pairs[part])
                    total += scale * found
                    total += zero * sums[part]
            more = more + (total,)
        totals = more
    # Halves of the outputs first: what is joined last lies side by side.
    even = tl.join(tl.join(totals[0], totals[4]), tl.join(totals[2], totals[6]))
    odd = tl.join(tl.join(totals[1], totals[5]), tl.join(totals[3], totals[7]))
    found = tl.reshape(tl.join(even, odd), (threads, 8))
    output += tl.arange(0, 8)
    if bits == 8:
        found = tl.sum(found - _too_large(totals, whole, 0, 8)[:, None], 0)
        found *= tl.load(scales + output, mask=output < outputs, other=0.0).to(tl.float32)
    else:
        found = tl.sum(found, 0)
    tl.store(product + output, found.to(product.dtype.element_ty), mask=output < outputs)


@triton.jit
def few_rows(
    states,
    factors,
    levels,
    scales,
    product,
    rows,
    outputs,
    inputs,
    units,
    reads,
    group: tl.constexpr,
    bits: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_words: tl.constexpr,
):
    """Compute some outputs of some rows, `[rows, inputs]` times `factors`, `[inputs]`, to `[parts, rows, outputs]`.

    `levels` are `[outputs, words]`, or bytes of words in 8 bits. A unit of a row is four words, or sixteen in 4 bits,
    and a part of a sum is of `reads` times `block_words` words. In 8 bits `scales` are `[outputs]`; in 4 bits they are
    words of a scale and the value of level 8, `[outputs, groups]`, each for `group` inputs.
    """
    output = (tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)).to(tl.int64)
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    inside = output < outputs
    words = units * (4 if bits == 8 else 16)
    place = tl.arange(0, block_words * (32 // bits))
    total = tl.zeros((block_rows, block_outputs), tl.float32)
    begin = tl.program_id(2) * reads * block_words
    for first in range(begin, tl.minimum(begin + reads * block_words, words), block_words):
        word = first + tl.arange(0, block_words)
        if bits == 8:
            column = first * 4 + place
            there = inside[:, None] & (column < words * 4)[None, :]
            weights = tl.load(levels + output[:, None] * (words * 4) + column[None, :], mask=there, other=0)
        else:
            column = first + place // 8
            column = column // 16 * 128 + column % 4 * 32 + column // 4 % 4 * 8 + place % 8
            there = inside[:, None] & (word < words)[None, :]
            read = tl.load(levels + output[:, None] * words + word[None, :], mask=there, other=0)
            read = (read[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
            at = scales + output[:, None] * _groups(units, group) + _group(word, group)[None, :]
            scale, zero = _scale_and_zero(tl.load(at, mask=there, other=0).to(tl.uint32, bitcast=True))
            weights = (read.to(tl.float32) - 8) * scale[:, :, None] + zero[:, :, None]
            weights = tl.reshape(weights, (block_outputs, block_words * 8))
        at = states + row.to(tl.int64)[:, None] * inputs + column[None, :]
        some = tl.load(at, mask=(row < rows)[:, None] & (column < inputs)[None, :], other=0.0)
        factor = tl.load(factors + column, mask=column < inputs, other=0.0)
        some = (some.to(tl.float32) * factor[None, :]).to(some.dtype)
        total = tl.dot(some, tl.trans(weights.to(some.dtype)), total)
    if bits == 8:
        total *= tl.load(scales + output, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = product + tl.program_id(2).to(tl.int64) * rows * outputs + row.to(tl.int64)[:, None] * outputs
    tl.store(
        at + output[None, :],
        total.to(product.dtype.element_ty),
        mask=(row < rows)[:, None] & inside[None, :],
    )


@triton.jit
def add_parts(parts, product, size, count: tl.constexpr, block: tl.constexpr):
    """Add up the parts of sums, `[count, size]` to `[size]`."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    total = tl.zeros((block,), tl.float32)
    for part in tl.static_range(count):
        total += tl.load(parts + part * size + at, mask=at < size, other=0.0)
    tl.store(product + at, total.to(product.dtype.element_ty), mask=at < size)


@custom_op("selfspec::few_rows_by_triton", mutates_args=())
def low_bits_product(states: Tensor, factors: Tensor, levels: Tensor, scales: Tensor) -> Tensor:
    """Multiply rows, `[rows, in]` to `[rows, out]` in their dtype, by `factors`, `[in]`, and a weight in few bits.

    In 8 bits `levels` are `[out, in]`, int8, `in` filled up to a multiple of 16, and `scales` `[out]`, bfloat16. In 4
    bits `levels` are `[out, words]`, int32, laid out as this module says with `in` filled up to a multiple of 128, and
    `scales` are `[out, groups, 2]`, bfloat16: the scale of a group, and the value of level 8. The size of a group is a
    power of two, at least 32.
    """
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(states):
        return _launched(states, factors, levels, scales)


@low_bits_product.register_fake
def _(states: Tensor, _: Tensor, levels: Tensor, *__: Tensor) -> Tensor:
    return states.new_empty(states.shape[0], levels.shape[0])


def _launched(states: Tensor, factors: Tensor, levels: Tensor, scales: Tensor) -> Tensor:
    dtype = states.dtype
    # The matrix units have no float64 here.
    states = states.to(torch.float32 if dtype == torch.float64 else dtype).contiguous()
    (rows, inputs), outputs = states.shape, levels.shape[0]
    bits = 8 if levels.dtype == torch.int8 else 4
    words = levels.view(torch.int32)
    count = words.shape[1]
    group = 0 if bits == 8 else count * 8 // scales.shape[1]
    product = states.new_empty(rows, outputs, dtype=dtype)
    scales = scales if bits == 8 else scales.view(torch.int32)
    sizes = (outputs, inputs, count // (4 if bits == 8 else 16))
    # Given, since Triton 3.9 warns if it is not.
    fused = {"enable_fp_fusion": True}
    if rows == 1:
        warps = _WARPS[bits]
        one_row[(triton.cdiv(outputs, 8),)](
            states,
            factors,
            words,
            scales,
            product,
            *sizes,
            group=group,
            bits=bits,
            threads=32 * warps,
            num_warps=warps,
            **fused,
        )
        return product
    every, programs = triton.cdiv(count, _WORDS[bits]), triton.cdiv(outputs, _OUTPUTS)
    reads = triton.cdiv(every, max(1, min(_PROGRAMS // programs, every // _READS)))
    parts = triton.cdiv(every, reads)
    found = product if parts == 1 else states.new_empty(parts, rows, outputs, dtype=torch.float32)
    few_rows[programs, triton.cdiv(rows, _ROWS), parts](
        states,
        factors,
        levels,
        scales,
        found,
        rows,
        *sizes,
        reads,
        group=group,
        bits=bits,
        block_rows=_ROWS,
        block_outputs=_OUTPUTS,
        block_words=_WORDS[bits],
        num_warps=4,
        num_stages=_STAGES[bits],
        **fused,
    )
    if parts > 1:
        size = rows * outputs
        add_parts[(triton.cdiv(size, 256),)](found, product, size, count=parts, block=256, num_warps=4, **fused)
    return product
