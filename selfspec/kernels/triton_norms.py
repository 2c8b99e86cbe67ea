"""Compute RMSNorm on a CUDA device in one launch, in Triton; torch's eight take longer than a product of one row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.trial import Trial

MOST_OFF = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Largest difference from torch's norm that rounding may make, relative to the largest number, by dtype."""

_TRIAL = Trial("RMSNorm")
# Numbers of a token for each warp of its program, and the most warps.
_OF_WARP, _MOST_WARPS = 512, 16


@triton.jit
def normalize_token(states, weight, output, width, epsilon, block: tl.constexpr):
    """Normalize one token of `[tokens, width]`; `block` is a power of two, at least `width`."""
    start = tl.program_id(0).to(tl.int64) * width
    inner = tl.arange(0, block)
    inside = inner < width
    wide = tl.load(states + start + inner, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + epsilon)
    # The modules round before they multiply with the weight.
    normalized = (wide * scale).to(output.dtype.element_ty).to(tl.float32)
    weighted = normalized * tl.load(weight + inner, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + start + inner, weighted.to(output.dtype.element_ty), mask=inside)


def tried_norm(states: Tensor, weight: Tensor, epsilon: float, *, stock: Callable[[], Tensor]) -> Tensor:
    """Compute `rms_norm`, or `stock`, the same by torch, if the kernel is not trusted."""
    kind = (states.device, states.dtype, states.shape[-1])
    return _TRIAL.run(kind, partial(rms_norm, states, weight, epsilon), stock, MOST_OFF[states.dtype])


def rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalize tokens, `[..., width]` in a dtype of `MOST_OFF`: `weight * states / sqrt(mean square + epsilon)`."""
    states = states.contiguous()
    width, output = states.shape[-1], torch.empty_like(states)
    block = int(triton.next_power_of_2(width))
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(states):
        normalize_token[states.numel() // width,](
            states,
            weight,
            output,
            width,
            epsilon,
            block=block,
            num_warps=max(1, min(_MOST_WARPS, block // _OF_WARP)),
            enable_fp_fusion=True,
        )
    return output
