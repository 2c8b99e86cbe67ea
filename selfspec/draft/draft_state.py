"""What a drafter keeps: during one generation, keys and values of its own; as long as the wrapper, what texts left."""

from __future__ import annotations

from collections.abc import Sequence


class Memory:
    """What a drafter keeps of texts as long as the wrapper, in `Batch.memories`."""


class DraftState:
    """Made by `Drafter.begin`, before any pass."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights, keys and values that it takes beside the model's own."""
        return 0

    def join(self, other: DraftState | None) -> None:
        """Take over what a state of the same drafter keeps for the rows of another batch, behind one's own."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only what belongs to some rows, which are numbered anew in the order given."""
