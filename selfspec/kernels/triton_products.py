"""Compute products of few rows with weights in 8 and 4 bits, or as they are, on a CUDA device, in Triton.

One launch multiplies with several weights, side by side, or with two, one of which gates the other. Weights are read
once for up to sixteen rows, of any dtype; those in few bits as words of 32 bits: four levels of 8 bits, in order, or
eight of 4 bits, the first in the lowest bits. In 4 bits a block of 128 inputs is 16 words, and word w has the inputs
from 32 (w % 4) + 8 (w // 4) on: four words that lie side by side, which a thread reads at once, hold 8 inputs of each
32, so that threads side by side read states side by side. Sizes alone decide the order in which an output is summed, so
a seed gives the same tokens in every process: nothing is tuned at run time.
"""

# Triton has no starred tuples.
# ruff: noqa: RUF005

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

# Rows of a program if there are several: the fewest that matrix units take.
_ROWS = 16
# The most of weights as they are, which are read again for more rows.
_MOST_ROWS = 64
# Outputs of a program over several rows, words of each that it reads at once, and how often before they are needed, by
# bits. Weights as they are have the bits of their dtype.
_OUTPUTS, _WORDS, _STAGES = 32, {32: 64, 16: 32, 8: 32, 4: 8}, {32: 3, 16: 4, 8: 4, 4: 6}
# Warps of a program over one row, by bits; each reads 128 words of each of 8 outputs at once.
_WARPS = {32: 4, 16: 4, 8: 4, 4: 2}
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
def place_of(outputs, program, block: tl.constexpr):
    """Return which of several weights a program reads, its first output there, and where its weight's outputs begin."""
    which, first, start = 0, 0, 0
    before, begin = 0, 0
    for part in tl.static_range(1, len(outputs)):
        before += tl.cdiv(outputs[part - 1], block)
        begin += outputs[part - 1]
        which = tl.where(program >= before, part, which)
        first = tl.where(program >= before, before, first)
        start = tl.where(program >= before, begin, start)
    return which, ((program - first) * block).to(tl.int64), start


@triton.jit
def one_of(every, which):
    """Return one of several numbers or addresses."""
    found = every[0]
    for part in tl.static_range(1, len(every)):
        found = tl.where(which == part, every[part], found)
    return found


@triton.jit
def activated(states, gate: tl.constexpr):
    """Compute the activation of a gate."""
    if gate == "silu":
        found = states * tl.sigmoid(states)
    elif gate == "gelu":
        found = 0.5 * states * (1.0 + tl.erf(states * 0.7071067811865476))
    else:
        # By the tangent, which is 2 sigmoid(2 x) - 1.
        found = states * tl.sigmoid(1.5957691216057308 * (states + 0.044715 * states * states * states))
    return found


@triton.jit
def _row_of_numbers(states, weight, output, outputs, inputs, threads: tl.constexpr):
    """Sum eight outputs of one row, `[8]`, with a weight in a dtype; a thread reads 16 bytes of each output at once."""
    wide: tl.constexpr = 128 // weight.dtype.element_ty.primitive_bitwidth
    thread = tl.arange(0, threads)
    totals = ()
    for _ in tl.static_range(8):
        totals = totals + (tl.zeros((threads,), tl.float32),)
    for first in range(0, inputs, wide * threads):
        column = first + thread[:, None] * wide + tl.arange(0, wide)[None, :]
        state = tl.load(states + column, mask=column < inputs, other=0.0).to(tl.float32)
        more = ()
        for number in tl.static_range(8):
            row = tl.minimum(output + number, outputs - 1)
            read = tl.load(weight + row * inputs + column, mask=column < inputs, other=0.0)
            more = more + (totals[number] + tl.sum(state * read.to(tl.float32), 1),)
        totals = more
    return tl.sum(_side_by_side(totals, threads), 0)


@triton.jit
def _side_by_side(totals, threads: tl.constexpr):
    """Join eight sums of each thread, `[threads, 8]`."""
    # Halves of the outputs first: what is joined last lies side by side.
    even = tl.join(tl.join(totals[0], totals[4]), tl.join(totals[2], totals[6]))
    odd = tl.join(tl.join(totals[1], totals[5]), tl.join(totals[3], totals[7]))
    return tl.reshape(tl.join(even, odd), (threads, 8))


@triton.jit
def _row_of_levels(
    states,
    factors,
    levels,
    scales,
    output,
    outputs,
    inputs,
    units,
    group: tl.constexpr,
    bits: tl.constexpr,
    threads: tl.constexpr,
):
    """Sum eight outputs of one row, `[8]`, with a weight in few bits.

    A thread reads four words of each output and the states that they multiply, and nothing of another thread: the sums
    of threads are added up at the end.
    """
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
    found = _side_by_side(totals, threads)
    if bits == 8:
        output += tl.arange(0, 8)
        found = tl.sum(found - _too_large(totals, whole, 0, 8)[:, None], 0)
        found *= tl.load(scales + output, mask=output < outputs, other=0.0).to(tl.float32)
    else:
        found = tl.sum(found, 0)
    return found


@triton.jit
def _row_of(
    states,
    factors,
    levels,
    scales,
    which,
    output,
    outputs,
    inputs,
    units,
    group: tl.constexpr,
    bits: tl.constexpr,
    threads: tl.constexpr,
):
    """Sum eight outputs of one row, `[8]`, with one of several weights."""
    level = one_of(levels, which)
    if bits > 8:
        # So the compiler knows that 16 bytes never begin past the end.
        found = _row_of_numbers(states, level, output, outputs, units * 16, threads)
    else:
        factor, scale = one_of(factors, which), one_of(scales, which)
        found = _row_of_levels(states, factor, level, scale, output, outputs, inputs, units, group, bits, threads)
    return found


@triton.jit
def one_row(
    states,
    factors,
    levels,
    scales,
    biases,
    product,
    outputs,
    inputs,
    units,
    group: tl.constexpr,
    bits: tl.constexpr,
    gate: tl.constexpr,
    threads: tl.constexpr,
):
    """Compute eight outputs of one row; arguments are as in `few_rows`."""
    which, output, start = place_of(outputs, tl.program_id(0), 8)
    count = one_of(outputs, which)
    found = _row_of(states, factors, levels, scales, which, output, count, inputs, units, group, bits, threads)
    if gate is not None:
        gated = activated(found, gate)
        found = gated * _row_of(states, factors, levels, scales, 1, output, count, inputs, units, group, bits, threads)
    output += tl.arange(0, 8)
    if biases is not None:
        found += tl.load(one_of(biases, which) + output, mask=output < count, other=0.0).to(tl.float32)
    tl.store(product + start + output, found.to(product.dtype.element_ty), mask=output < count)


@triton.jit
def _tile(
    states,
    factors,
    levels,
    scales,
    which,
    output,
    row,
    rows,
    outputs,
    inputs,
    units,
    reads,
    group: tl.constexpr,
    bits: tl.constexpr,
    block_words: tl.constexpr,
):
    """Sum a part of some outputs of some rows, `[rows, outputs]`, with one of several weights."""
    factors, levels, scales = one_of(factors, which), one_of(levels, which), one_of(scales, which)
    inside = output < outputs
    words = units * (4 if bits == 8 else bits // 2 if bits > 8 else 16)
    place = tl.arange(0, block_words * (32 // bits))
    total = tl.zeros((row.shape[0], output.shape[0]), tl.float32)
    begin = tl.program_id(2) * reads * block_words
    for first in range(begin, tl.minimum(begin + reads * block_words, words), block_words):
        word = first + tl.arange(0, block_words)
        if bits > 8:
            column = first * (32 // bits) + place
            there = inside[:, None] & (column < inputs)[None, :]
            weights = tl.load(levels + output[:, None] * (units * 16) + column[None, :], mask=there, other=0.0)
        elif bits == 8:
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
            weights = tl.reshape(weights, (output.shape[0], block_words * 8))
        at = states + row.to(tl.int64)[:, None] * inputs + column[None, :]
        some = tl.load(at, mask=(row < rows)[:, None] & (column < inputs)[None, :], other=0.0)
        if bits <= 8:
            factor = tl.load(factors + column, mask=column < inputs, other=0.0)
            some = (some.to(tl.float32) * factor[None, :]).to(some.dtype)
        total = tl.dot(some, tl.trans(weights.to(some.dtype)), total, input_precision="ieee" if bits == 32 else None)
    if bits == 8:
        total *= tl.load(scales + output, mask=inside, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def few_rows(
    states,
    factors,
    levels,
    scales,
    biases,
    product,
    rows,
    outputs,
    every,
    inputs,
    units,
    reads,
    group: tl.constexpr,
    bits: tl.constexpr,
    gate: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_words: tl.constexpr,
):
    """Compute some outputs of some rows, `[rows, inputs]` times `factors`, `[inputs]`, to `[parts, rows, every]`.

    Of each weight there is one in `factors`, `levels`, `scales`, `biases` and `outputs`; they lie side by side in the
    product, or the first, activated by `gate`, is a factor of the second. `levels` are `[outputs, words]`, or bytes of
    words in 8 bits, or numbers, without factors. A unit of a row is four words, or sixteen in 4 bits, or sixteen
    numbers, and a part of a sum is of `reads` times `block_words` words. In 8 bits `scales` are `[outputs]`; in 4 bits
    they are words of a scale and the value of level 8, `[outputs, groups]`, each for `group` inputs.
    """
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    which, output, start = place_of(outputs, tl.program_id(0), block_outputs)
    output += tl.arange(0, block_outputs)
    count = one_of(outputs, which)
    total = _tile(
        states, factors, levels, scales, which, output, row, rows, count, inputs, units, reads, group, bits, block_words
    )
    if gate is not None:
        gated = activated(total, gate)
        total = gated * _tile(
            states, factors, levels, scales, 1, output, row, rows, count, inputs, units, reads, group, bits, block_words
        )
    if biases is not None:
        # Once, in the first part of a sum.
        there = output < tl.where(tl.program_id(2) == 0, count, 0)
        total += tl.load(one_of(biases, which) + output, mask=there, other=0.0).to(tl.float32)[None, :]
    at = product + tl.program_id(2).to(tl.int64) * rows * every + row.to(tl.int64)[:, None] * every + start
    tl.store(
        at + output[None, :],
        total.to(product.dtype.element_ty),
        mask=(row < rows)[:, None] & (output < count)[None, :],
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
    return joint_product(states, [levels], [factors], [scales])


@low_bits_product.register_fake
def _(states: Tensor, _: Tensor, levels: Tensor, *__: Tensor) -> Tensor:
    return states.new_empty(states.shape[0], levels.shape[0])


def joint_product(
    states: Tensor,
    weights: Sequence[Tensor],
    factors: Sequence[Tensor] = (),
    scales: Sequence[Tensor] = (),
    biases: Sequence[Tensor] = (),
    gate: str | None = None,
) -> Tensor:
    """Multiply rows, `[rows, in]`, with several weights of one kind in one launch: `[rows, sum of outputs]`.

    Weights are `[out, in]`, contiguous, in the dtype of the states, `in` a multiple of 16, or levels with their factors
    and scales, as in `low_bits_product`. There is a bias, `[out]`, for each or none. With a `gate`, "silu", "gelu" or
    "gelu_by_tanh", there are two weights, and the activated first product is a factor of the second: `[rows, out]`.
    """
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(states):
        return _launched(states, weights, factors, scales, biases, gate)


def _launched(
    states: Tensor,
    weights: Sequence[Tensor],
    factors: Sequence[Tensor],
    scales: Sequence[Tensor],
    biases: Sequence[Tensor],
    gate: str | None,
) -> Tensor:
    dtype = states.dtype
    # The matrix units have no float64 here.
    states = states.to(torch.float32 if dtype == torch.float64 else dtype).contiguous()
    (rows, inputs), outputs = states.shape, tuple(len(each) for each in weights)
    every = sum(outputs) if gate is None else outputs[0]
    bits, group = 8 * weights[0].element_size(), 0
    if factors:
        bits = 8 if weights[0].dtype == torch.int8 else 4
        count = weights[0].view(torch.int32).shape[1]
        units = count // (4 if bits == 8 else 16)
        if bits == 4:
            group = count * 8 // scales[0].shape[1]
            scales = [each.view(torch.int32) for each in scales]
    else:
        # None of these is read.
        factors = scales = weights
        units, count = inputs // 16, inputs * bits // 32
    product = states.new_empty(rows, every, dtype=dtype)
    held = tuple(biases) or None
    # Given, since Triton 3.9 warns if it is not.
    how = {"group": group, "bits": bits, "gate": gate, "enable_fp_fusion": True}
    if rows == 1:
        warps = _WARPS[bits]
        words = tuple(each.view(torch.int32) if bits <= 8 else each for each in weights)
        one_row[(sum(triton.cdiv(each, 8) for each in (outputs if gate is None else outputs[:1])),)](
            *(states, tuple(factors), words, tuple(scales), held, product, outputs, inputs, units),
            threads=32 * warps,
            num_warps=warps,
            **how,
        )
        return product
    programs = sum(triton.cdiv(each, _OUTPUTS) for each in (outputs if gate is None else outputs[:1]))
    reads = blocks = triton.cdiv(count, _WORDS[bits])
    if gate is None:
        reads = triton.cdiv(blocks, max(1, min(_PROGRAMS // programs, blocks // _READS)))
    parts, block = triton.cdiv(blocks, reads), _ROWS
    if bits > 8:
        block = max(_ROWS, min(_MOST_ROWS, int(triton.next_power_of_2(rows))))
    found = product if parts == 1 else states.new_empty(parts, rows, every, dtype=torch.float32)
    few_rows[programs, triton.cdiv(rows, block), parts](
        *(states, tuple(factors), tuple(weights), tuple(scales), held, found),
        *(rows, outputs, every, inputs, units, reads),
        block_rows=block,
        block_outputs=_OUTPUTS,
        block_words=_WORDS[bits],
        num_warps=4,
        num_stages=_STAGES[bits],
        **how,
    )
    if parts > 1:
        size = rows * every
        fused = {"enable_fp_fusion": True}
        add_parts[(triton.cdiv(size, 256),)](found, product, size, count=parts, block=256, num_warps=4, **fused)
    return product
