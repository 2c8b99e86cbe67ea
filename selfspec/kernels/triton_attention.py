"""Compute attention of a few tokens over many slots on a CUDA device, in Triton.

With a mask, torch's kernels copy keys and values for each head of a group. Here a program takes all heads of a group
and a run of slots, whose length does not depend on the batch, and reads only slots that one of its tokens sees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.trial import Trial

MOST_TOKENS = 64
"""The most tokens of each row; longer blocks use the kernels for prompts."""

MOST_OFF = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference from torch's attention that rounding may make, relative to the largest number, by dtype."""

_TRIAL = Trial("attention of blocks")

# Slots of a run, doubled until there are at most this many runs.
_RUN, _MOST_RUNS = 64, 64
# Bytes of keys and of queries that a program reads together, and its most rows: tokens times heads of a group.
_TILE, _QUERIES, _ROWS = 16384, 32768, 64


@triton.jit
def attend_run(
    queries,
    keys,
    values,
    mask,
    output,
    largest,
    totals,
    query_strides,
    key_strides,
    value_strides,
    mask_strides,
    tokens,
    slots,
    run,
    key_heads,
    group,
    scale: tl.constexpr,
    width: tl.constexpr,
    value_width: tl.constexpr,
    block_rows: tl.constexpr,
    block_slots: tl.constexpr,
    block_width: tl.constexpr,
    block_values: tl.constexpr,
    is_added: tl.constexpr,
    is_whole: tl.constexpr,
):
    """Attend from some tokens and heads of a group, `block_rows` together, to a run of slots.

    Shapes are those of `block_attention`; the mask is `[batch, heads, tokens, slots]`, bytes, or numbers if `is_added`.
    With several runs, `output` is sums, `[runs, batch, tokens, heads, value_width]`, and the largest score and the sum
    of weights of each run are written too. `block_width` and `block_values` are powers of two, at least the widths.
    `scale` is constant, since as a run-time argument it would be rounded to float32.
    """
    # Offsets may pass 2^31.
    batch = (tl.program_id(0) // key_heads).to(tl.int64)
    key_head = (tl.program_id(0) % key_heads).to(tl.int64)
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    there = row < group * tokens
    head, token = key_head * group + row // tokens, row % tokens
    inner, value_inner = tl.arange(0, block_width), tl.arange(0, block_values)
    query = tl.load(
        queries
        + batch * query_strides[0]
        + head[:, None] * query_strides[1]
        + token[:, None] * query_strides[2]
        + inner[None, :] * query_strides[3],
        mask=there[:, None] & (inner < width)[None, :],
        other=0.0,
    )
    wide: tl.constexpr = tl.float64 if query.dtype == tl.float64 else tl.float32
    most = tl.full((block_rows,), float("-inf"), wide)
    total = tl.zeros((block_rows,), wide)
    sums = tl.zeros((block_rows, block_values), wide)
    masked = mask + batch * mask_strides[0] + head[:, None] * mask_strides[1] + token[:, None] * mask_strides[2]
    key_start = keys + batch * key_strides[0] + key_head * key_strides[1]
    value_start = values + batch * value_strides[0] + key_head * value_strides[1]
    first = tl.program_id(2) * run
    for start in range(first, tl.minimum(first + run, slots), block_slots):
        slot = (start + tl.arange(0, block_slots)).to(tl.int64)
        inside = there[:, None] & (slot < slots)[None, :]
        said = tl.load(masked + slot[None, :] * mask_strides[3], mask=inside, other=0)
        sees = inside & ((said.to(wide) > float("-inf")) if is_added else (said != 0))
        # Slots that no token sees are not read, and tiles of such slots take no time.
        seen = tl.max(sees.to(tl.int32), 0) > 0
        if tl.max(seen.to(tl.int32), 0) > 0:
            key = tl.load(
                key_start + slot[:, None] * key_strides[2] + inner[None, :] * key_strides[3],
                mask=seen[:, None] & (inner < width)[None, :],
                other=0.0,
            )
            scores = tl.dot(query, tl.trans(key), out_dtype=wide, input_precision="ieee") * scale
            if is_added:
                scores += said.to(wide)
            scores = tl.where(sees, scores, float("-inf"))
            above = tl.maximum(most, tl.max(scores, 1))
            # All weights of a row that has seen no slot yet are 0.
            shift = tl.where(above == float("-inf"), 0.0, above)
            weights = tl.exp(scores - shift[:, None])
            less = tl.exp(most - shift)
            value = tl.load(
                value_start + slot[:, None] * value_strides[2] + value_inner[None, :] * value_strides[3],
                mask=seen[:, None] & (value_inner < value_width)[None, :],
                other=0.0,
            )
            total = total * less + tl.sum(weights, 1)
            sums = sums * less[:, None] + tl.dot(weights.to(value.dtype), value, out_dtype=wide, input_precision="ieee")
            most = above
    heads = key_heads * group
    batches = tl.num_programs(0) // key_heads
    place = ((tl.program_id(2) * batches + batch) * tokens + token) * heads + head
    if is_whole:
        sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    else:
        tl.store(largest + place, most, mask=there)
        tl.store(totals + place, total, mask=there)
    tl.store(
        output + place[:, None] * value_width + value_inner[None, :],
        sums.to(output.dtype.element_ty),
        mask=there[:, None] & (value_inner < value_width)[None, :],
    )


@triton.jit
def join_runs(sums, largest, totals, output, runs, value_width, block_runs: tl.constexpr, block_values: tl.constexpr):
    """Join all runs of one token and head: sums `[runs, rows, value_width]`, largest and totals `[runs, rows]`."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    run, inner = tl.arange(0, block_runs).to(tl.int64), tl.arange(0, block_values)
    most = tl.load(largest + run * rows + row, mask=run < runs, other=float("-inf"))
    above = tl.max(most, 0)
    weights = tl.exp(most - tl.where(above == float("-inf"), 0.0, above))
    total = tl.sum(weights * tl.load(totals + run * rows + row, mask=run < runs, other=0.0), 0)
    each = tl.load(
        sums + (run * rows + row)[:, None] * value_width + inner[None, :],
        mask=(run < runs)[:, None] & (inner < value_width)[None, :],
        other=0.0,
    )
    joined = tl.sum(weights[:, None] * each, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(output + row * value_width + inner, joined.to(output.dtype.element_ty), mask=inner < value_width)


def tried_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, *, stock: Callable[[], Tensor]
) -> Tensor:
    """Compute `block_attention`, or `stock`, the same by torch, if the kernel is not trusted."""
    sizes = (queries.shape[-1], values.shape[-1], _rows(queries, keys), _run(keys) < keys.shape[2])
    kind = (queries.device, queries.dtype, mask.dtype, *sizes)
    kernel = partial(block_attention, queries, keys, values, mask, scale)
    return _TRIAL.run(kind, kernel, stock, MOST_OFF[queries.dtype])


def block_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend from few tokens to many slots: `[batch, tokens, heads, value_width]`; a token that sees none gets zeros.

    Queries are `[batch, heads, tokens, width]`, keys and values `[batch, key_heads, slots, ...]`, in one dtype;
    consecutive heads of queries share a head of keys. The mask broadcasts to `[batch, heads, tokens, slots]`: True if a
    token sees a slot, or numbers to add to scores.
    """
    (batch, heads, tokens, width), (_, key_heads, slots, value_width) = queries.shape, values.shape
    mask = mask.expand(batch, heads, tokens, slots)
    is_added = mask.dtype != torch.bool
    group, rows, run = heads // key_heads, _rows(queries, keys), _run(keys)
    runs = triton.cdiv(slots, run)
    output = queries.new_empty(batch, tokens, heads, value_width)
    wide = torch.float64 if queries.dtype == torch.float64 else torch.float32
    sums = output if runs == 1 else output.new_empty(runs, *output.shape, dtype=wide)
    largest, totals = (output.new_empty(runs, *output.shape[:-1], dtype=wide) for _ in range(2))
    block_width, block_values = (max(16, triton.next_power_of_2(each)) for each in (width, value_width))
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(queries):
        attend_run[batch * key_heads, triton.cdiv(group * tokens, rows), runs](
            queries,
            keys,
            values,
            mask if is_added else mask.view(torch.uint8),
            sums,
            largest,
            totals,
            queries.stride(),
            keys.stride(),
            values.stride(),
            mask.stride(),
            tokens,
            slots,
            run,
            key_heads,
            group,
            scale=scale,
            width=width,
            value_width=value_width,
            block_rows=rows,
            block_slots=max(16, min(64, _TILE // (block_width * keys.element_size()))),
            block_width=block_width,
            block_values=block_values,
            is_added=is_added,
            is_whole=runs == 1,
            num_stages=2,
            enable_fp_fusion=True,
        )
        if runs > 1:
            join_runs[batch * tokens * heads,](
                sums,
                largest,
                totals,
                output,
                runs,
                value_width,
                block_runs=triton.next_power_of_2(runs),
                block_values=block_values,
                enable_fp_fusion=True,
            )
    return output


def _rows(queries: Tensor, keys: Tensor) -> int:
    """Return the rows of a program, tokens times heads of a group: at least the 16 that matrix units need."""
    rows = queries.shape[1] // keys.shape[1] * queries.shape[2]
    most = _QUERIES // int(triton.next_power_of_2(queries.shape[-1]) * queries.element_size())
    return max(16, min(_ROWS, most, int(triton.next_power_of_2(rows))))


def _run(keys: Tensor) -> int:
    return _RUN * int(triton.next_power_of_2(triton.cdiv(keys.shape[2], _RUN * _MOST_RUNS)))
