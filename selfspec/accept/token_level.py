"""Token-level rejection sampling: each draft token is accepted with probability min(1, p/q), until one is rejected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from selfspec.cache.tree import Tree
    from selfspec.draft.draft import Draft


@dataclass(frozen=True)
class TokenLevel:
    """Speculative sampling of Leviathan et al. (2023), algorithm 1, and Chen et al. (2023), algorithm 2.

    The committed tokens are distributed exactly as draws from p. Greedy decoding is the case of a one-hot p: a draft
    token is accepted if it is the target's choice, and the residual is that choice.
    """

    lossless = True
    couples = False

    def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
        """min(1, p/q) of each draft token, `[rows, nodes]`."""
        index = draft.tokens[..., None]
        p_token = p[:, : index.shape[1]].gather(-1, index)[..., 0]
        if draft.probs is None:
            return p_token
        return (p_token / draft.probs.gather(-1, index)[..., 0]).clamp(max=1.0)

    def accepted(self, mask: Tensor, tree: Tree) -> Tensor:
        """Place of the last node before the first that is rejected, `[rows]`."""
        return unbroken(mask)

    def recovery_probs(self, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
        """max(p - q, 0) before the first rejected token, p after the last draft token; `[rows, vocab]`.

        Where rounding leaves nothing of the residual (p and q equal but for the last bits), p itself.
        """
        tokens = draft.tokens
        drafted = tokens.shape[1]
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        p_next = p[rows, place]
        if drafted == 0:
            return p_next
        rejected = place.clamp(max=drafted - 1)
        if draft.probs is None:
            q_next = torch.zeros_like(p_next).scatter_(-1, tokens[rows, rejected][:, None], 1.0)
        else:
            q_next = draft.probs[rows, rejected]
        residual = (p_next - q_next).clamp_min(0.0)
        keep_p = (place == drafted)[:, None] | (residual.sum(-1, keepdim=True) == 0)
        return torch.where(keep_p, p_next, residual)


def unbroken(mask: Tensor) -> Tensor:
    """Number of accepted tokens before the first rejected one, `[rows]`, in a mask `[rows, drafted]`."""
    return mask.long().cumprod(-1).sum(-1)
