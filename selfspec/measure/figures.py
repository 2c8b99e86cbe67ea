"""What an exit is worth on text that is given: agreement with the full model, and 1 - TV, the chance of acceptance."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class ExitFigures:
    """Sums over the positions of a text, at one exit.

    Attributes:
        positions: counted so far.
        agreed: positions where exit and full model have the same likeliest token.
        overlap: sum of 1 - TV(p, q) over the positions, by temperature.
    """

    positions: int = 0
    agreed: float = 0.0
    overlap: dict[float, float] = field(default_factory=dict)

    def add(self, full: Tensor, draft: Tensor, temperatures: tuple[float, ...] = (1.0,)) -> None:
        """Count some positions.

        Args:
            full: logits of the full model, `[positions, vocab]`.
            draft: logits of the exit, the same; -inf where it has no such token.
            temperatures: at which 1 - TV is summed up.
        """
        self.positions += full.shape[0]
        self.agreed += float((full.argmax(-1) == draft.argmax(-1)).sum())
        for temperature in temperatures:
            p, q = (full.float() / temperature).softmax(-1), (draft.float() / temperature).softmax(-1)
            self.overlap[temperature] = self.overlap.get(temperature, 0.0) + float(torch.minimum(p, q).sum())

    @property
    def agreement(self) -> float:
        """Top-1 agreement: the greedy acceptance rate on this text."""
        return self.agreed / self.positions

    def alpha(self, temperature: float = 1.0) -> float:
        """Mean of 1 - TV(p, q): the acceptance rate of sampled drafts on this text (Leviathan et al., 2023)."""
        return self.overlap[temperature] / self.positions
