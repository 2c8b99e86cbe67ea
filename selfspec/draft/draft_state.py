"""What a drafter keeps during one generation: keys and values of its own, tables, indexes."""


class DraftState:
    """Made by `Drafter.begin`, before any pass."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights, keys and values that it takes beside the model's own."""
        return 0
