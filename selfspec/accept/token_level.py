"""Token-level rejection sampling: accept each draft token with probability min(1, p/q), until one is rejected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.accept.tree_paths import first_path, tree_tables
from selfspec.cache.tree import Tree
from selfspec.draft.draft import Draft


@dataclass(frozen=True)
class TokenLevel:
    """Speculative sampling of Leviathan et al. (2023), algorithm 1, and Chen et al. (2023), algorithm 2.

    Over trees it is recursive rejection sampling (Miao et al., 2024, arXiv 2305.09781; Jeon et al., 2024, arXiv
    2402.14160): siblings are judged in turn, each against the residual that rejected siblings before it leave of p.

    Committed tokens are distributed exactly as draws from p. Greedy decoding is the case of a one-hot p: a draft token
    is accepted if it is the target's choice, and the residual is that choice.
    """

    name = "token"
    help = "rejection sampling token by token (Leviathan et al., 2023); greedy decoding is a special case"
    lossless = True
    couples = False

    def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
        tokens, probs = draft.tokens, draft.probs
        if draft.tree.is_chain:
            return _chances(p[:, :-1], tokens, probs)
        chances = torch.empty_like(tokens, dtype=p.dtype)
        left = p
        for rank in tree_tables(draft.tree, p.device).ranks:
            left = left[:, rank.before]
            if rank.siblings is not None:
                residual = less_q(left, draft, (slice(None), rank.siblings))
                left = _normalised(torch.where(_is_empty(residual), left, residual))
            q = None if probs is None else probs[:, rank.nodes]
            chances[:, rank.nodes] = _chances(left, tokens[:, rank.nodes], q)
        return chances

    def accepted(self, mask: Tensor, tree: Tree) -> Tensor:
        return first_path(mask, tree)

    def recovery_probs(self, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
        # If rounding leaves nothing of a residual (p and q differ in the last bits alone), q is not subtracted.
        rows = torch.arange(place.shape[0], device=place.device)
        left = p[rows, place]
        for rank, (child, missing) in enumerate(_children(draft.tree, place)):
            left = _normalised(left) if rank else left
            residual = less_q(left, draft, (rows, child))
            left = torch.where(missing[:, None] | _is_empty(residual), left, residual)
        return left


def _chances(p: Tensor, tokens: Tensor, probs: Tensor | None) -> Tensor:
    index = tokens[..., None]
    p_token = p.gather(-1, index)[..., 0]
    if probs is None:
        return p_token
    return (p_token / probs.gather(-1, index)[..., 0]).clamp(max=1.0)


def _is_empty(residual: Tensor) -> Tensor:
    return residual.sum(-1, keepdim=True) == 0


def _normalised(weights: Tensor) -> Tensor:
    # Where the target gives no distribution (its logits were not finite) zeros stay zeros.
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def _children(tree: Tree, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each n, the n-th child of each row's place and whether it is missing, `[rows]` each."""
    if not tree.is_chain:
        for child in tree_tables(tree, place.device).children[place].unbind(-1):
            yield child.clamp(min=0), child < 0
    elif len(tree):
        yield place.clamp(max=len(tree) - 1), place == len(tree)


def less_q(p: Tensor, draft: Draft, nodes: tuple[Tensor | slice, Tensor | slice | int]) -> Tensor:
    """Return max(p - q, 0) with q at an index of rows and nodes; q is one-hot if the draft was not drawn."""
    if draft.probs is None:
        q = torch.zeros_like(p).scatter_(-1, draft.tokens[nodes][..., None], 1.0)
    else:
        q = draft.probs[nodes]
    return (p - q).clamp_min(0.0)


@dataclass(frozen=True)
class Coupled(TokenLevel):
    """Chooses draft and target tokens at a place with the same noise; accepts the draft token where they are equal.

    So the output does not depend on the draft: with equal seeds it equals plain decoding under `accept="coupled"`,
    token for token where the arithmetic allows (float32, float64). The noise makes p and q one-hot, and the rule is the
    greedy case of `TokenLevel`. Its acceptance rate is less than the optimum, 1 - TV(p, q), but at least
    (1 - TV) / (1 + TV) (Daliri et al., 2024). In a tree it accepts the child that the noise chooses.
    """

    name = "coupled"
    help = "sampled tokens do not depend on the draft: the same seed gives plain decoding's, token for token"
    couples = True
