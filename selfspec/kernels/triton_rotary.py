"""Rotate queries and keys to their positions on a CUDA device in one Triton launch, with the bits of torch's ten."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that the kernel computes in, each as torch does."""


@triton.jit
def _turned(one, cosine, other, sine, sign: tl.constexpr):
    """Rotate one coordinate; each product is rounded to the dtype of the states, as in torch."""
    wide: tl.constexpr = tl.float64 if one.dtype == tl.float64 else tl.float32
    along = (one.to(wide) * cosine.to(wide)).to(one.dtype).to(wide)
    across = (other.to(wide) * sine.to(wide)).to(one.dtype).to(wide)
    return (along + sign * across).to(one.dtype)


@triton.jit
def rotate_head(
    queries,
    keys,
    cosines,
    sines,
    rotated_queries,
    rotated_keys,
    query_strides,
    key_strides,
    turn_strides,
    tokens,
    heads,
    key_heads,
    half: tl.constexpr,
    block: tl.constexpr,
):
    """Rotate one head of one token; outputs are `[batch, tokens, heads, 2 * half]`, other shapes those of `rotated`.

    The first of `turn_strides` is 0 if all rows share cosines and sines; `block` is a power of two, at least `half`.
    """
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    head = tl.program_id(1)
    if head < heads:
        source = queries + batch * query_strides[0] + head * query_strides[1] + token * query_strides[2]
        step = query_strides[3]
        target = rotated_queries + ((batch * tokens + token) * heads + head) * (2 * half)
    else:
        head -= heads
        source = keys + batch * key_strides[0] + head * key_strides[1] + token * key_strides[2]
        step = key_strides[3]
        target = rotated_keys + ((batch * tokens + token) * key_heads + head) * (2 * half)
    inner = tl.arange(0, block)
    inside = inner < half
    turn = batch * turn_strides[0] + token * turn_strides[1] + inner * turn_strides[2]
    behind = half * turn_strides[2]
    first = tl.load(source + inner * step, mask=inside, other=0.0)
    second = tl.load(source + (half + inner) * step, mask=inside, other=0.0)
    cosine = tl.load(cosines + turn, mask=inside, other=0.0)
    sine = tl.load(sines + turn, mask=inside, other=0.0)
    tl.store(target + inner, _turned(first, cosine, second, sine, -1), mask=inside)
    cosine = tl.load(cosines + turn + behind, mask=inside, other=0.0)
    sine = tl.load(sines + turn + behind, mask=inside, other=0.0)
    tl.store(target + half + inner, _turned(second, cosine, first, sine, 1), mask=inside)


def rotated(queries: Tensor, keys: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys to their positions (Su et al., 2021), the halves of a head as its two coordinates.

    They are `[batch, heads, tokens, width]`; cosines and sines, of equal strides, are `[batch or 1, tokens, width]`.
    All have one dtype of `DTYPES`.
    """
    (batch, heads, tokens, width), key_heads = queries.shape, keys.shape[1]
    turned = queries.new_empty(batch, tokens, heads, width), keys.new_empty(batch, tokens, key_heads, width)
    rows, *turn_strides = cosines.stride()
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(queries):
        rotate_head[batch * tokens, heads + key_heads](
            queries,
            keys,
            cosines,
            sines,
            *turned,
            queries.stride(),
            keys.stride(),
            (rows if cosines.shape[0] > 1 else 0, *turn_strides),
            tokens,
            heads,
            key_heads,
            half=width // 2,
            block=int(triton.next_power_of_2(width // 2)),
            num_warps=1,
            # Torch rounds between a product and a sum.
            enable_fp_fusion=False,
        )
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)
