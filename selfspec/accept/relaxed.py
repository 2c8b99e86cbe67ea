"""Rules that are not lossless: they accept more, but the output no longer follows p. They run only if named."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.accept.tree_paths import at_parents, longest_path
from selfspec.arguments import is_finite, is_whole, shown
from selfspec.cache.tree import Tree
from selfspec.draft.draft import Draft
from selfspec.errors import UnsupportedOptionError


@dataclass(frozen=True)
class _Relaxed:
    """Accept the longest path above a threshold (chances are 1 or 0); after it, take the target's own token."""

    lossless = False
    couples = False

    def accepted(self, mask: Tensor, tree: Tree) -> Tensor:
        return longest_path(mask, tree)

    def recovery_probs(self, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
        return p[torch.arange(p.shape[0], device=p.device), place]


@dataclass(frozen=True)
class Typical(_Relaxed):
    """Typical acceptance of Medusa (Cai et al., 2024, arXiv 2401.10774), section 2.3.1.

    A draft token x is accepted if p(x) > min(epsilon, delta exp(-H(p))), with H the entropy of p in nats: where the
    target is unsure, almost any token is accepted. Greedy decoding has an H of 0 and stays exact.
    """

    name = "relaxed-typical"
    help = "accepts what is likely for the entropy of p (Medusa, 2024); exact where decoding is greedy"
    epsilon: float = 0.3
    delta: float = 0.09

    def __post_init__(self) -> None:
        if not is_finite(self.epsilon) or not 0 <= self.epsilon <= 1:
            raise UnsupportedOptionError(f"epsilon is a chance in 0..1, got {shown(self.epsilon)}")
        if not is_finite(self.delta) or self.delta < 0:
            raise UnsupportedOptionError(f"delta must be at least 0 and finite, got {shown(self.delta)}")

    def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
        judged = at_parents(p, draft.tree)
        entropy: Tensor = torch.special.entr(judged).sum(-1)
        threshold = (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
        return (judged.gather(-1, draft.tokens[..., None])[..., 0] > threshold).to(p.dtype)


@dataclass(frozen=True)
class TopKTolerance(_Relaxed):
    """Spec-Verification of SpecDec (Xia et al., 2023, arXiv 2203.16487), section 3.2.

    A draft token is accepted if it is among the target's likeliest tokens and its log-likelihood is close to that of
    the likeliest. The rule judges logits before temperature and filters, so it relaxes greedy decoding, too.

    Attributes:
        top_k: number of likeliest tokens to accept (beta in the paper).
        tolerance: largest gap in log-likelihood, in nats (tau in the paper).
    """

    name = "relaxed-top-k"
    help = "accepts the likeliest tokens within a tolerance (SpecDec, 2023)"
    top_k: int = 3
    tolerance: float = 1.0

    def __post_init__(self) -> None:
        if not is_whole(self.top_k) or self.top_k < 1:
            raise UnsupportedOptionError(f"top_k must be an integer of at least 1, got {shown(self.top_k)}")
        if self.tolerance != math.inf and not (is_finite(self.tolerance) and self.tolerance >= 0):
            raise UnsupportedOptionError(f"tolerance must be a number of at least 0, got {shown(self.tolerance)}")

    def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
        judged = at_parents(logits, draft.tree)
        score = judged.gather(-1, draft.tokens[..., None])
        rank = (judged > score).sum(-1)
        gap = judged.amax(-1) - score[..., 0]
        return ((rank < self.top_k) & (gap <= self.tolerance)).to(p.dtype)
