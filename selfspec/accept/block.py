"""Block verification: the draft is judged as a whole, and no less of it is accepted than token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.cache.tree import Tree
from selfspec.draft.draft import Draft
from selfspec.errors import UnsupportedOptionError


@dataclass(frozen=True)
class Block:
    """Block verification of Sun et al. (2024, arXiv 2403.10444), algorithm 2.

    With P_0 = 1 and P_i = min(1, P_{i-1} p(x_i) / q(x_i)), the draft is accepted up to the last i whose draw falls
    within its chance, and the token after it is drawn from max(P_i p - q, 0). The committed tokens are distributed
    exactly as draws from p, and no lossless rule commits more of a draft in expectation. It judges chains alone.
    """

    lossless = True
    couples = False

    def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
        """Chance that the draft is accepted at least up to each node, were it the last, `[rows, nodes]`.

        Raises:
            UnsupportedOptionError: the draft is no chain.
        """
        if not draft.tree.is_chain:
            raise UnsupportedOptionError(
                "block verification judges chains, and this drafter drafts trees; use accept='token'"
            )
        q = _dense(draft, p)
        weights = _prefix_weights(draft.tokens, q, p)[:, 1:]
        if draft.tokens.shape[1] == 0:
            return weights
        left = _residual(weights[:, :-1], p[:, 1:-1], q[:, 1:]).sum(-1)
        # 0 / 0 where the prefix is accepted for sure and p equals q after it: what follows is accepted too.
        inner = torch.where(left > 0, left / (left + (1 - weights[:, :-1])), (weights[:, :-1] == 1).to(p.dtype))
        # Where the target gives no distribution (its logits were not finite) the draft ends.
        inner = torch.where(p[:, 1:-1].sum(-1) > 0, inner, weights[:, :-1])
        return torch.cat([inner, weights[:, -1:]], 1)

    def accepted(self, mask: Tensor, tree: Tree) -> Tensor:
        """Place of the last node whose draw fell within its chance, `[rows]`."""
        places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        return (mask * places).amax(-1) if mask.shape[1] else mask.sum(-1)

    def recovery_probs(self, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
        """max(P_i p - q, 0) after i < drafted tokens, p after the last; `[rows, vocab]`."""
        tokens = draft.tokens
        drafted = tokens.shape[1]
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        p_next = p[rows, place]
        if drafted == 0:
            return p_next
        q = _dense(draft, p)
        weight = _prefix_weights(tokens, q, p)[rows, place]
        residual = _residual(weight, p_next, q[rows, place.clamp(max=drafted - 1)])
        keep_p = (place == drafted)[:, None] | (residual.sum(-1, keepdim=True) == 0)
        return torch.where(keep_p, p_next, residual)


def _dense(draft: Draft, p: Tensor) -> Tensor:
    if draft.probs is not None:
        return draft.probs
    return torch.zeros_like(p[:, : draft.tokens.shape[1]]).scatter_(-1, draft.tokens[..., None], 1.0)


def _prefix_weights(tokens: Tensor, q: Tensor, p: Tensor) -> Tensor:
    """P_0 .. P_drafted, `[rows, drafted + 1]`."""
    index = tokens[..., None]
    ratio = p[:, : tokens.shape[1]].gather(-1, index)[..., 0] / q.gather(-1, index)[..., 0]
    weights = [torch.ones_like(p[:, 0, 0])]
    for position in range(tokens.shape[1]):
        weights.append((weights[-1] * ratio[:, position]).clamp(max=1.0))
    return torch.stack(weights, 1)


def _residual(weight: Tensor, p: Tensor, q: Tensor) -> Tensor:
    return (weight[..., None] * p - q).clamp_min(0.0)
