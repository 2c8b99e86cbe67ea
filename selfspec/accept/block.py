"""Block verification: judge the draft as a whole, and accept at least as much of a chain as token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.accept.token_level import less_q
from selfspec.accept.tree_paths import at_parents, from_leaves, tree_tables
from selfspec.cache.tree import Tree
from selfspec.draft.draft import Draft


@dataclass(frozen=True)
class Block:
    """Block verification of Sun et al. (2024, arXiv 2403.10444), algorithm 2.

    Over trees it is traversal verification (Weng et al., 2025, arXiv 2505.12398).

    Every place has a weight P: 1 at the last committed token, min(1, P(parent) p(x) / q(x)) at a node. Each node is
    judged after its children; the first whose draw is within its weight is accepted with its whole path. A rejected
    child leaves its parent the residual max(P p - q, 0), normalised. If that sums to s, its weight becomes
    s / (s + 1 - P). The next token is drawn from what all rejected children leave of p.

    Committed tokens are distributed exactly as draws from p. No lossless rule commits more of a chain in expectation.
    On trees it commits no less than the token-level rule if siblings are drawn with or without replacement and no
    sibling is followed by one with a deeper subtree; else it may accept a short path before it judges a long one.
    """

    name = "block"
    help = "block verification (Sun et al., 2024) of the whole draft: accepts at least as much as `token`"
    lossless = True
    couples = False

    def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
        """Return the chance of each node if no node judged before it is accepted, `[rows, nodes]`."""
        weights, left = _before_last_children(draft, p)
        if draft.tree.depth > 1:
            inner: slice | Tensor = slice(1, len(draft.tree))
            last: slice | Tensor = inner
            if not draft.tree.is_chain:
                tables = tree_tables(draft.tree, p.device)
                inner, last = tables.inner, tables.last_children[tables.inner]
            weight, here = weights[:, inner], left[:, inner]
            weights[:, inner] = _weight_after(weight, here, _residual(weight, here, draft, (slice(None), last)))
        return weights[:, 1:]

    def accepted(self, mask: Tensor, tree: Tree) -> Tensor:
        return from_leaves(mask, tree)

    def recovery_probs(self, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
        rows = torch.arange(place.shape[0], device=place.device)
        if not len(draft.tree):
            return p[rows, place]
        weights, left = _before_last_children(draft, p)
        last = tree_tables(draft.tree, place.device).last_children[place]
        here = left[rows, place]
        residual = _residual(weights[rows, place], here, draft, (rows, last.clamp(min=0)))
        return torch.where((last < 0)[:, None] | (residual.sum(-1, keepdim=True) == 0), here, residual)


def _before_last_children(draft: Draft, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return each place's weight, `[rows, nodes + 1]`, and residual of p, before its last child is rejected."""
    tree, left = draft.tree, p
    ratios = _ratios(at_parents(p, tree), draft, slice(None))
    weights = [torch.ones_like(p[:, 0, 0])]
    for node, parent in enumerate(tree.parents):
        place, siblings = parent + 1, tree.children[parent + 1]
        ratio = ratios[:, node] if node == siblings[0] else _ratios(left[:, place], draft, node)
        weights.append((weights[place] * ratio).clamp(max=1.0))
        if node != siblings[-1]:
            left = p.clone() if left is p else left
            here = left[:, place]
            residual = _residual(weights[place], here, draft, (slice(None), node))
            weights[place] = _weight_after(weights[place], here, residual)
            total = residual.sum(-1, keepdim=True)
            left[:, place] = torch.where(total > 0, residual / total, here)
    return torch.stack(weights, 1), left


def _ratios(p: Tensor, draft: Draft, nodes: slice | int) -> Tensor:
    index = draft.tokens[:, nodes, None]
    p_token = p.gather(-1, index)[..., 0]
    if draft.probs is None:
        return p_token
    ratios = p_token / draft.probs[:, nodes].gather(-1, index)[..., 0]
    # A ratio is infinite where q is close to 0; times 0, the weight of a parent, it would be NaN.
    return ratios.clamp(max=torch.finfo(ratios.dtype).max)


def _residual(weight: Tensor, p: Tensor, draft: Draft, nodes: tuple[Tensor | slice, Tensor | slice | int]) -> Tensor:
    """Return max(P p - q, 0)."""
    return less_q(weight[..., None] * p, draft, nodes)


def _weight_after(weight: Tensor, p: Tensor, residual: Tensor) -> Tensor:
    """Return the weight of a place after a child is rejected, s / (s + 1 - P)."""
    total = residual.sum(-1)
    # Avoid 0 / 0 where P is 1 and p equals q: the child is certainly accepted, and the weight stays 1.
    after = torch.where(total > 0, total / (total + (1 - weight)), (weight == 1).to(weight.dtype))
    # Where the target gives no distribution (its logits were not finite) the draft ends.
    return torch.where(p.sum(-1) > 0, after, weight)
