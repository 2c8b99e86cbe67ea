"""What a rejected draft token leaves of the target's p."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.draft.draft import Draft


def less_q(p: Tensor, draft: Draft, nodes: tuple[Tensor | slice, Tensor | slice | int]) -> Tensor:
    """max(p - q, 0), with q of the nodes at an index of rows and nodes: one-hot where the draft was not drawn."""
    if draft.probs is None:
        q = torch.zeros_like(p).scatter_(-1, draft.tokens[nodes][..., None], 1.0)
    else:
        q = draft.probs[nodes]
    return (p - q).clamp_min(0.0)
