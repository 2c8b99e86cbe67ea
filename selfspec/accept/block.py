"""Block verification: the draft is judged as a whole, and never stands shorter in expectation than token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Block verification of Sun et al. (2024, arXiv 2403.10444), algorithm 2.

    With P_0 = 1 and P_i = min(1, P_{i-1} p(x_i) / q(x_i)), the draft stands up to the last i whose coin shows heads,
    and the token after it is drawn from max(P_i p - q, 0). The committed tokens are distributed exactly as draws from
    p, and no lossless rule commits more of a draft in expectation.
    """

    lossless = True
    couples = False

    def heads(self, tokens: Tensor, q: Tensor | None, p: Tensor, logits: Tensor) -> Tensor:
        """Chance that the draft stands at least up to each position, were it the last, `[batch, drafted]`."""
        q = _dense(tokens, q, p)
        stands = _prefix_weights(tokens, q, p)[:, 1:]
        if tokens.shape[1] == 0:
            return stands
        left = _residual(stands[:, :-1], p[:, 1:-1], q[:, 1:]).sum(-1)
        # 0 / 0 where the draft stands for sure and p equals q after it: it goes on standing.
        inner = torch.where(left > 0, left / (left + (1 - stands[:, :-1])), (stands[:, :-1] == 1).to(p.dtype))
        # Where the target gives no distribution (its logits were not finite) the draft ends.
        inner = torch.where(p[:, 1:-1].sum(-1) > 0, inner, stands[:, :-1])
        return torch.cat([inner, stands[:, -1:]], 1)

    def accepted(self, coins: Tensor) -> Tensor:
        """Position of the last heads, counted from 1; 0 without any, `[batch]`."""
        places = torch.arange(1, coins.shape[1] + 1, device=coins.device)
        return (coins * places).amax(-1) if coins.shape[1] else coins.sum(-1)

    def next(self, tokens: Tensor, q: Tensor | None, p: Tensor, accepted: Tensor) -> Tensor:
        """max(P_i p - q, 0) after i < drafted tokens, p after the last; `[batch, vocab]`."""
        drafted = tokens.shape[1]
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        p_next = p[rows, accepted]
        if drafted == 0:
            return p_next
        q = _dense(tokens, q, p)
        weight = _prefix_weights(tokens, q, p)[rows, accepted]
        residual = _residual(weight, p_next, q[rows, accepted.clamp(max=drafted - 1)])
        keep_p = (accepted == drafted)[:, None] | (residual.sum(-1, keepdim=True) == 0)
        return torch.where(keep_p, p_next, residual)


def _dense(tokens: Tensor, q: Tensor | None, p: Tensor) -> Tensor:
    if q is not None:
        return q
    return torch.zeros_like(p[:, : tokens.shape[1]]).scatter_(-1, tokens[..., None], 1.0)


def _prefix_weights(tokens: Tensor, q: Tensor, p: Tensor) -> Tensor:
    """P_0 .. P_drafted, `[batch, drafted + 1]`."""
    index = tokens[..., None]
    ratio = p[:, : tokens.shape[1]].gather(-1, index)[..., 0] / q.gather(-1, index)[..., 0]
    weights = [torch.ones_like(p[:, 0, 0])]
    for position in range(tokens.shape[1]):
        weights.append((weights[-1] * ratio[:, position]).clamp(max=1.0))
    return torch.stack(weights, 1)


def _residual(weight: Tensor, p: Tensor, q: Tensor) -> Tensor:
    return (weight[..., None] * p - q).clamp_min(0.0)
