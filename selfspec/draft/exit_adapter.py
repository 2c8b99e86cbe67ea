"""The adapter of an exit head: from states at an exit layer to states the model's own norm and head can read."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ExitAdapter(nn.Module):
    """Norm and gated MLP on a residual branch; new, it changes nothing, so that training begins at the plain exit.

    It looks at one position at a time and so needs no keys and values of its own, unlike an attention adapter
    (Kangaroo, Liu et al., 2024): nothing of it has to be computed for the prompt or rolled back.

    Args:
        hidden: width of the model.
        rank: width of the MLP.
    """

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.gate = nn.Linear(hidden, rank, bias=False)
        self.up = nn.Linear(hidden, rank, bias=False)
        self.down = nn.Linear(rank, hidden, bias=False)
        self.scale = nn.Parameter(torch.ones(hidden))
        nn.init.zeros_(self.down.weight)

    def forward(self, states: Tensor) -> Tensor:
        """Adapt states, `[..., hidden]`."""
        normed = self.norm(states)
        adapted: Tensor = self.scale * states + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return adapted
