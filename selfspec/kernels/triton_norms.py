"""Compute RMSNorm on a CUDA device in one launch, in Triton; torch's eight take longer than a product of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers of a token for each warp of its program, and the most warps.
_OF_WARP, _MOST_WARPS = 512, 16


@triton.jit
def _normed(states, weight, inner, width, epsilon, shift, rounds: tl.constexpr):
    """Compute `(weight + shift) x / sqrt(mean square + epsilon)` of one token, in float32."""
    inside = inner < width
    scale = tl.rsqrt(tl.sum(states * states, 0) / width + epsilon)
    normed = states * scale
    if rounds:
        # The modules round before they multiply with the weight.
        normed = normed.to(weight.dtype.element_ty).to(tl.float32)
    return normed * (tl.load(weight + inner, mask=inside, other=0.0).to(tl.float32) + shift)


@triton.jit
def normalize_token(
    states,
    before,
    residual,
    weight,
    total,
    output,
    width,
    epsilons,
    shifts,
    is_normed: tl.constexpr,
    is_added: tl.constexpr,
    rounds: tl.constexpr,
    block: tl.constexpr,
):
    """Normalize one token of `[tokens, width]`; `block` is a power of two, at least `width`.

    `is_added`: a residual is added first, and the sum written to `total`; `is_normed`: the weight `before` normalizes
    what it is added to.
    """
    start = tl.program_id(0).to(tl.int64) * width
    inner = tl.arange(0, block)
    inside = inner < width
    wide = tl.load(states + start + inner, mask=inside, other=0.0).to(tl.float32)
    if is_normed:
        wide = _normed(wide, before, inner, width, epsilons[0], shifts[0], rounds)
        wide = wide.to(total.dtype.element_ty).to(tl.float32)
    if is_added:
        wide += tl.load(residual + start + inner, mask=inside, other=0.0).to(tl.float32)
        wide = wide.to(total.dtype.element_ty)
        tl.store(total + start + inner, wide, mask=inside)
        wide = wide.to(tl.float32)
    normed = _normed(wide, weight, inner, width, epsilons[1], shifts[1], rounds)
    tl.store(output + start + inner, normed.to(output.dtype.element_ty), mask=inside)


def rms_norm(states: Tensor, weight: Tensor, epsilon: float, shift: float = 0.0) -> Tensor:
    """Normalize tokens, `[..., width]` in up to 32 bits: `(weight + shift) x / sqrt(mean square + epsilon)`."""
    output = torch.empty_like(states, memory_format=torch.contiguous_format)
    _launched(states, None, None, weight, output, output, (0.0, epsilon), (0.0, shift))
    return output


def added_norm(
    states: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    shift: float,
    before: tuple[Tensor, float, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Add states, normalized by `before`, its epsilon and its shift, to a residual; return the sum and its norm.

    Both are `[..., width]`, as in `rms_norm`.
    """
    total, output = (torch.empty_like(states, memory_format=torch.contiguous_format) for _ in range(2))
    first, of_first, shifted = (None, 0.0, 0.0) if before is None else before
    _launched(states, first, residual.contiguous(), weight, total, output, (of_first, epsilon), (shifted, shift))
    return total, output


def _launched(
    states: Tensor,
    before: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    total: Tensor,
    output: Tensor,
    epsilons: tuple[float, float],
    shifts: tuple[float, float],
) -> None:
    width = states.shape[-1]
    block = int(triton.next_power_of_2(width))
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(states):
        normalize_token[states.numel() // width,](
            states.contiguous(),
            # What is not there is not read.
            weight if before is None else before,
            total if residual is None else residual,
            weight,
            total,
            output,
            width,
            epsilons,
            shifts,
            is_normed=before is not None,
            is_added=residual is not None,
            rounds=not any(shifts),
            block=block,
            num_warps=max(1, min(_MOST_WARPS, block // _OF_WARP)),
            enable_fp_fusion=True,
        )
