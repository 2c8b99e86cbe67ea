"""Judge chains by token-level rejection sampling on a CUDA device, in Triton, in one launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.trial import Trial

# Tokens that a program processes together.
_BLOCK = 4096
_TRIAL = Trial("judging of chains")


@triton.jit
def _better(best, at, score, token):
    """Return the larger scores, place by place, and their tokens; of equal scores the first."""
    higher = score > best
    return tl.where(higher, score, best), tl.where(higher, token, at)


@triton.jit
def judge_rows(
    p,
    q,
    tokens,
    uniform,
    judged,
    noise,
    verdict,
    nodes,
    vocabulary,
    is_drawn: tl.constexpr,
    is_sampled: tl.constexpr,
    is_cut: tl.constexpr,
    block: tl.constexpr,
):
    """Judge the chain of a row; write the number of accepted tokens and the token after them, `[rows, 2]`.

    Shapes are those of `judge_chain`. `is_drawn`: the draft was drawn from q; else q is one-hot. `is_sampled`:
    `uniform` and `noise` are read; else all chances are 0 and 1, and the likeliest token follows. `is_cut`: `judged` is
    read.
    """
    row = tl.program_id(0).to(tl.int64)
    own, drawn = p + row * (nodes + 1) * vocabulary, q + row * nodes * vocabulary
    accepted, stands = 0, True
    for node in range(nodes):
        token = tl.load(tokens + row * nodes + node)
        chance = tl.load(own + node * vocabulary + token)
        if is_drawn:
            chance = tl.div_rn(chance, tl.load(drawn + node * vocabulary + token))
        if is_sampled:
            stands = stands & (tl.load(uniform + row * nodes + node) < chance.to(tl.float64))
        else:
            stands = stands & (chance > 0.5)
        if is_cut:
            stands = stands & (tl.load(judged + row * nodes + node) != 0)
        accepted += stands.to(tl.int32)
    # After the last node, or if rounding leaves a residual empty, p is used as it is.
    is_last = accepted == nodes
    child = tl.minimum(accepted, nodes - 1)
    drafted = tl.load(tokens + row * nodes + child)
    inner = tl.arange(0, block)
    best = tl.full((block,), float("-inf"), p.dtype.element_ty)
    best_left, at, at_left = best, inner, inner
    most_left = tl.zeros((block,), p.dtype.element_ty)
    for first in range(0, vocabulary, block):
        token = first + inner
        inside = token < vocabulary
        weight = tl.load(own + accepted * vocabulary + token, mask=inside, other=0.0)
        if is_drawn:
            taken = tl.load(drawn + child * vocabulary + token, mask=inside, other=0.0)
        else:
            taken = tl.where(token == drafted, 1.0, 0.0).to(weight.dtype)
        left = tl.maximum(weight - taken, 0.0)
        most_left = tl.maximum(most_left, left)
        if is_sampled:
            luck = tl.load(noise + row * vocabulary + token, mask=inside, other=1.0)
            weight, left = tl.div_rn(weight, luck), tl.div_rn(left, luck)
        best, at = _better(best, at, tl.where(inside, weight, float("-inf")), token)
        best_left, at_left = _better(best_left, at_left, tl.where(inside, left, float("-inf")), token)
    if is_last | (tl.max(most_left, 0) == 0.0):
        best_left, at_left = best, at
    chosen = tl.min(tl.where(best_left == tl.max(best_left, 0), at_left, vocabulary), 0)
    tl.store(verdict + 2 * row, accepted)
    tl.store(verdict + 2 * row + 1, chosen)


def judge_chain(
    p: Tensor, q: Tensor | None, tokens: Tensor, uniform: Tensor | None, judged: Tensor | None, noise: Tensor | None
) -> Tensor:
    """Accept tokens of a chain by min(1, p/q) until one is rejected, and draw the next: number and token, `[rows, 2]`.

    `p` is `[rows, nodes + 1, vocabulary]` and `q` `[rows, nodes, vocabulary]`, float32; None: q is one-hot at `tokens`.
    `uniform`, `[rows, nodes]`, float64, accepts tokens, and `noise`, unit exponentials above 0, `[rows, vocabulary]`,
    float32, draws the next; both None: all chances are 0 and 1. `judged` says which nodes are judged; None: all.
    """
    (rows, nodes), vocabulary = tokens.shape, p.shape[-1]
    p, q = p.contiguous(), None if q is None else q.contiguous()
    verdict = tokens.new_empty(rows, 2)
    # Arguments that are None are not read.
    given = [tokens if each is None else each.contiguous() for each in (uniform, judged, noise)]
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(p):
        judge_rows[rows,](
            p,
            p if q is None else q,
            tokens.contiguous(),
            given[0],
            given[1] if judged is None else given[1].view(torch.uint8),
            given[2],
            verdict,
            nodes,
            vocabulary,
            is_drawn=q is not None,
            is_sampled=uniform is not None,
            is_cut=judged is not None,
            block=min(_BLOCK, triton.next_power_of_2(vocabulary)),
            num_warps=8,
            enable_fp_fusion=True,
        )
    return verdict


def tried_verdict(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    uniform: Tensor | None,
    judged: Tensor | None,
    noise: Tensor | None,
    stock: Callable[[], Tensor],
) -> Tensor:
    """Judge by `judge_chain`, or `stock`, the same by torch, if the kernel is not trusted."""
    kind = (p.device, p.dtype, q is None, uniform is None, judged is None)
    return _TRIAL.run(kind, lambda: judge_chain(p, q, tokens, uniform, judged, noise), stock, most=0.0)
