"""The block of a round as tensors: where its nodes lie, their positions, and what each of them sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.cache.tree import Tree
from selfspec.device import to_device


@dataclass(frozen=True)
class OpenBlock:
    """The last committed token and the nodes of a tree, in the slots from each row's cursor on.

    Everything about the tree is in tensors whose shapes depend on its size alone, so that one recording of a pass
    serves for all trees of that size.

    Attributes:
        start: slot of the last committed token, `[batch, 1]`, or `[1, 1]` where all cursors are equal.
        depths: 0 for the last committed token, then the depth of each node, `[nodes + 1]`.
        sees: which of these (columns) each of them (rows) sees, itself and its ancestors, `[nodes + 1, nodes + 1]`.
    """

    start: Tensor
    depths: Tensor
    sees: Tensor

    @staticmethod
    def tables(tree: Tree, device: torch.device) -> tuple[Tensor, Tensor]:
        """`depths` and `sees` of a tree."""
        sees = torch.zeros(len(tree) + 1, len(tree) + 1, dtype=torch.bool)
        sees[:, 0] = True
        for node, path in enumerate(tree.paths):
            sees[node + 1, torch.tensor(path) + 1] = True
        return to_device((0, *tree.depths), device), to_device(sees, device)

    @property
    def nodes(self) -> int:
        """Number of nodes of the tree."""
        return self.depths.shape[0] - 1

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All of them, in the order of the attributes."""
        return self.start, self.depths, self.sees

    def positions(self, slots: Tensor) -> Tensor:
        """Positions of what lies in some slots of each row, `[batch or 1, slots]`: before the block, the slot's own."""
        place = slots - self.start
        inside = self.start + self.depths[self._clamped(place)]
        return torch.where(place < 0, slots, inside)

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether tokens of the block see what lies in other slots, `[batch or 1, queries, keys]`.

        Args:
            queries: slots of the tokens, `[batch or 1, queries]`.
            keys: the other slots, `[batch or 1, keys]`.
        """
        query, key = (queries - self.start)[:, :, None], (keys - self.start)[:, None, :]
        own = self.sees[query, self._clamped(key)] & (key <= self.nodes)
        return (key < 0) | own

    def _clamped(self, place: Tensor) -> Tensor:
        return place.clamp(0, self.nodes)
