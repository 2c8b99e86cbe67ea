"""Rules that are not lossless: faster, and the output is no longer the target's own. Only for those who ask by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.accept.token_level import unbroken


@dataclass(frozen=True)
class _Relaxed:
    """Accept by a threshold; where a draft token falls below it, take the target's own token in its place."""

    lossless = False
    couples = False

    def accepted(self, coins: Tensor) -> Tensor:
        """Number of heads before the first tails, `[batch]`."""
        return unbroken(coins)

    def next(self, tokens: Tensor, q: Tensor | None, p: Tensor, accepted: Tensor) -> Tensor:
        """The target's p after the accepted tokens, `[batch, vocab]`."""
        return p[torch.arange(tokens.shape[0], device=tokens.device), accepted]


@dataclass(frozen=True)
class Typical(_Relaxed):
    """Typical acceptance of Medusa (Cai et al., 2024, arXiv 2401.10774), section 2.3.1.

    A draft token x stands if p(x) > min(epsilon, delta exp(-H(p))), with H the entropy of p in nats: almost anything
    goes where the target is unsure. Greedy decoding has a p without entropy and stays exact.

    Attributes:
        epsilon: what is always likely enough.
        delta: what is likely enough, as a share of exp(-H(p)).
    """

    epsilon: float = 0.3
    delta: float = 0.09

    def heads(self, tokens: Tensor, q: Tensor | None, p: Tensor, logits: Tensor) -> Tensor:
        """1 where a draft token is typical, else 0, `[batch, drafted]`."""
        judged = p[:, : tokens.shape[1]]
        entropy: Tensor = torch.special.entr(judged).sum(-1)
        threshold = (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
        return (judged.gather(-1, tokens[..., None])[..., 0] > threshold).to(p.dtype)


@dataclass(frozen=True)
class TopKTolerance(_Relaxed):
    """Spec-Verification of SpecDec (Xia et al., 2023, arXiv 2203.16487), section 3.2.

    A draft token stands if it is among the target's `top_k` likeliest and its log-likelihood is at most `tolerance`
    below the likeliest token's. Judged on the target's own logits, before temperature and filters, so it relaxes
    greedy decoding too.

    Attributes:
        top_k: how many tokens are good enough (the paper's beta).
        tolerance: how much less likely, in nats (the paper's tau).
    """

    top_k: int = 3
    tolerance: float = 1.0

    def heads(self, tokens: Tensor, q: Tensor | None, p: Tensor, logits: Tensor) -> Tensor:
        """1 where a draft token is tolerable, else 0, `[batch, drafted]`."""
        judged = logits[:, : tokens.shape[1]]
        score = judged.gather(-1, tokens[..., None])
        rank = (judged > score).sum(-1)
        gap = judged.amax(-1) - score[..., 0]
        return ((rank < self.top_k) & (gap <= self.tolerance)).to(p.dtype)
