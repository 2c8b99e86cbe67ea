"""Token-level rejection sampling: each draft token stands with probability min(1, p/q), until one does not."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.accept.rule import Verdict


def token_level(tokens: Tensor, q: Tensor | None, p: Tensor, noise: Tensor) -> Verdict:
    """Speculative sampling of Leviathan et al. (2023), algorithm 1, and Chen et al. (2023), algorithm 2.

    The committed tokens are distributed exactly as draws from p. Greedy decoding is the case of a one-hot p: a draft
    token stands if it is the target's choice, and the residual is that choice.

    Args:
        tokens: draft tokens, `[batch, drafted]`.
        q: the distribution each was drawn from, `[batch, drafted, vocab]`, or None for a deterministic draft.
        p: the target's distributions, `[batch, drafted + 1, vocab]`.
        noise: independent uniforms in [0, 1), `[batch, drafted]`.

    Returns:
        The verdict. The residual is max(p - q, 0) at the first rejected position; where rounding leaves none of it
        (p and q equal but for the last bits), p itself.
    """
    drafted = tokens.shape[1]
    index = tokens[..., None]
    p_token = p[:, :drafted].gather(-1, index)[..., 0]
    q_token = torch.ones_like(p_token) if q is None else q.gather(-1, index)[..., 0]
    # noise < p / q, written without the division: q may underflow.
    stands = noise * q_token < p_token
    accepted = stands.cumprod(-1).sum(-1)

    rows = torch.arange(tokens.shape[0], device=tokens.device)
    p_next = p[rows, accepted]
    if drafted == 0:
        return Verdict(accepted, p_next)
    # After the last draft token nothing was rejected, so nothing is taken off p there.
    rejected = (accepted < drafted)[:, None]
    last = accepted.clamp(max=drafted - 1)
    if q is None:
        q_next = torch.zeros_like(p_next).scatter_(-1, tokens[rows, last][:, None], 1.0)
    else:
        q_next = q[rows, last]
    residual = (p_next - q_next).clamp_min(0.0)
    empty = residual.sum(-1, keepdim=True) == 0
    return Verdict(accepted, torch.where(rejected & ~empty, residual, p_next))
