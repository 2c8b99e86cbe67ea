"""Rotate queries and keys to their positions on a CUDA device in one Triton launch, with the bits of torch's ten.

The same launch writes keys and values to the slots of a cache, and may normalize heads of queries and keys first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turned(one, cosine, other, sine, sign: tl.constexpr):
    """Rotate one coordinate; each product is rounded to the dtype of the states, as in torch."""
    wide: tl.constexpr = tl.float64 if one.dtype == tl.float64 else tl.float32
    along = (one.to(wide) * cosine.to(wide)).to(one.dtype).to(wide)
    across = (other.to(wide) * sine.to(wide)).to(one.dtype).to(wide)
    return (along + sign * across).to(one.dtype)


@triton.jit
def _normed(one, other, weight, inner, half: tl.constexpr, epsilon, shift):
    """Normalize a head, given in halves: `(weight + shift) x / sqrt(mean square + epsilon)`."""
    left, right = one.to(tl.float32), other.to(tl.float32)
    scale = tl.rsqrt((tl.sum(left * left, 0) + tl.sum(right * right, 0)) / (2 * half) + epsilon)
    by_left = tl.load(weight + inner, mask=inner < half, other=0.0).to(tl.float32) + shift
    by_right = tl.load(weight + half + inner, mask=inner < half, other=0.0).to(tl.float32) + shift
    return (left * scale * by_left).to(one.dtype), (right * scale * by_right).to(one.dtype)


@triton.jit
def rotate_head(
    queries,
    keys,
    values,
    cosines,
    sines,
    rotated_queries,
    kept_keys,
    kept_values,
    slots,
    query_norm,
    key_norm,
    query_strides,
    key_strides,
    value_strides,
    turn_strides,
    kept_key_strides,
    kept_value_strides,
    slot_strides,
    tokens,
    heads,
    key_heads,
    epsilon,
    shift,
    half: tl.constexpr,
    block: tl.constexpr,
):
    """Rotate one head of one token, or copy one of values; shapes are those of `rotated_to_cache`.

    Norms may be missing. The first of `turn_strides` is 0 if all rows share cosines and sines; `block` is a power of
    two, at least `half`.
    """
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    head = tl.program_id(1)
    inner = tl.arange(0, block)
    inside = inner < half
    slot = tl.load(slots + batch * slot_strides[0] + token * slot_strides[1])
    if head >= heads + key_heads:
        head -= heads + key_heads
        source = values + batch * value_strides[0] + head * value_strides[1] + token * value_strides[2]
        target = kept_values + batch * kept_value_strides[0] + head * kept_value_strides[1]
        target += slot * kept_value_strides[2]
        for part in tl.static_range(2):
            place = part * half + inner
            read = tl.load(source + place * value_strides[3], mask=inside, other=0.0)
            tl.store(target + place * kept_value_strides[3], read.to(kept_values.dtype.element_ty), mask=inside)
    else:
        is_query = head < heads
        if is_query:
            source = queries + batch * query_strides[0] + head * query_strides[1] + token * query_strides[2]
        else:
            head -= heads
            source = keys + batch * key_strides[0] + head * key_strides[1] + token * key_strides[2]
        step = query_strides[3] if is_query else key_strides[3]
        first = tl.load(source + inner * step, mask=inside, other=0.0)
        second = tl.load(source + (half + inner) * step, mask=inside, other=0.0)
        if query_norm is not None:
            norm = query_norm if is_query else key_norm
            first, second = _normed(first, second, norm, inner, half, epsilon, shift)
        turn = batch * turn_strides[0] + token * turn_strides[1] + inner * turn_strides[2]
        behind = half * turn_strides[2]
        cosine = tl.load(cosines + turn, mask=inside, other=0.0)
        sine = tl.load(sines + turn, mask=inside, other=0.0)
        left = _turned(first, cosine, second, sine, -1)
        cosine = tl.load(cosines + turn + behind, mask=inside, other=0.0)
        sine = tl.load(sines + turn + behind, mask=inside, other=0.0)
        right = _turned(second, cosine, first, sine, 1)
        if is_query:
            target = rotated_queries + ((batch * tokens + token) * heads + head) * (2 * half)
            tl.store(target + inner, left, mask=inside)
            tl.store(target + half + inner, right, mask=inside)
        else:
            target = kept_keys + batch * kept_key_strides[0] + head * kept_key_strides[1]
            target += slot * kept_key_strides[2]
            tl.store(target + inner * kept_key_strides[3], left.to(kept_keys.dtype.element_ty), mask=inside)
            target += half * kept_key_strides[3]
            tl.store(target + inner * kept_key_strides[3], right.to(kept_keys.dtype.element_ty), mask=inside)


def rotated_to_cache(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cosines: Tensor,
    sines: Tensor,
    buffers: tuple[Tensor, Tensor],
    slots: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    epsilon: float = 0.0,
    shift: float = 0.0,
) -> Tensor:
    """Rotate heads to their positions (Su et al., 2021), the halves of a head as its two coordinates.

    Queries, `[batch, heads, tokens, width]`, are returned; keys, and values, which are not rotated, are written to
    `slots`, `[tokens]` or `[batch, tokens]`, of buffers, `[batch, key_heads, slots, width]` in any dtype. Cosines and
    sines, of equal strides, are `[batch or 1, tokens, width]`, in the dtype of the heads. Heads of queries and keys are
    normalized before, as `rms_norm` does, with `norms`, `[width]`.
    """
    (batch, heads, tokens, width), key_heads = queries.shape, keys.shape[1]
    turned = queries.new_empty(batch, tokens, heads, width)
    rows, *turn_strides = cosines.stride()
    kept, kept_values = buffers
    at = (0, *slots.stride())[-2:]
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(queries):
        rotate_head[batch * tokens, heads + 2 * key_heads](
            *(queries, keys, values, cosines, sines, turned, kept, kept_values, slots),
            *((None, None) if norms is None else norms),
            *(queries.stride(), keys.stride(), values.stride()),
            (rows if cosines.shape[0] > 1 else 0, *turn_strides),
            *(kept.stride(), kept_values.stride(), at, tokens, heads, key_heads, epsilon, shift),
            half=width // 2,
            block=int(triton.next_power_of_2(width // 2)),
            num_warps=1,
            # Torch rounds between a product and a sum.
            enable_fp_fusion=False,
        )
    return turned.transpose(1, 2)
