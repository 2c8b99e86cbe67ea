"""Exit heads in training: one adapter for each exit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from selfspec.draft.exit_head import ExitAdapter


class ExitHeads(nn.Module):
    """One adapter for each exit.

    Args:
        hidden: width of the model.
        rank: width of each adapter's MLP.
        exits: exit layers.
    """

    def __init__(self, hidden: int, rank: int, exits: Sequence[int]) -> None:
        super().__init__()
        self.hidden = hidden
        self.rank = rank
        self.exits = nn.ModuleDict({str(exit_layer): ExitAdapter(hidden, rank) for exit_layer in exits})

    def forward(self, states: dict[int, Tensor]) -> dict[int, Tensor]:
        """Adapt the states `[batch, tokens, hidden]` of each exit."""
        return {exit_layer: self.exits[str(exit_layer)](entering) for exit_layer, entering in states.items()}
