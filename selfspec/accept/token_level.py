"""Token-level rejection sampling: each draft token stands with probability min(1, p/q), until one does not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLevel:
    """Speculative sampling of Leviathan et al. (2023), algorithm 1, and Chen et al. (2023), algorithm 2.

    The committed tokens are distributed exactly as draws from p. Greedy decoding is the case of a one-hot p: a draft
    token stands if it is the target's choice, and the residual is that choice.
    """

    lossless = True
    couples = False

    def heads(self, tokens: Tensor, q: Tensor | None, p: Tensor, logits: Tensor) -> Tensor:
        """min(1, p/q) of each draft token, `[batch, drafted]`."""
        index = tokens[..., None]
        p_token = p[:, : tokens.shape[1]].gather(-1, index)[..., 0]
        if q is None:
            return p_token
        return (p_token / q.gather(-1, index)[..., 0]).clamp(max=1.0)

    def accepted(self, coins: Tensor) -> Tensor:
        """Number of heads before the first tails, `[batch]`."""
        return unbroken(coins)

    def next(self, tokens: Tensor, q: Tensor | None, p: Tensor, accepted: Tensor) -> Tensor:
        """max(p - q, 0) at the first rejected position, p after the last draft token; `[batch, vocab]`.

        Where rounding leaves nothing of the residual (p and q equal but for the last bits), p itself.
        """
        drafted = tokens.shape[1]
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        p_next = p[rows, accepted]
        if drafted == 0:
            return p_next
        rejected = accepted.clamp(max=drafted - 1)
        if q is None:
            q_next = torch.zeros_like(p_next).scatter_(-1, tokens[rows, rejected][:, None], 1.0)
        else:
            q_next = q[rows, rejected]
        residual = (p_next - q_next).clamp_min(0.0)
        keep_p = (accepted == drafted)[:, None] | (residual.sum(-1, keepdim=True) == 0)
        return torch.where(keep_p, p_next, residual)


def unbroken(coins: Tensor) -> Tensor:
    """Number of heads before the first tails, `[batch]`, in coins `[batch, drafted]`."""
    return coins.long().cumprod(-1).sum(-1)
