"""What a reduced vocabulary does to the cost of a draft step from each exit."""

from __future__ import annotations

from selfspec.errors import DraftConfigError
from selfspec.model.summary import ExitSummary, ModelSummary


def exits_reading(anatomy: ModelSummary, rows: int) -> tuple[ExitSummary, ...]:
    """Every exit, where a draft step reads only some rows of the head.

    Args:
        anatomy: of the model.
        rows: tokens that can be drafted.

    Returns:
        First exit to last; bytes are rounded down.

    Raises:
        DraftConfigError: the model does not have so many tokens.
    """
    if not 1 <= rows <= anatomy.vocabulary:
        raise DraftConfigError(f"a reduced vocabulary of {rows} is out of range: this model has {anatomy.vocabulary}")
    saved = anatomy.head.bytes * (anatomy.vocabulary - rows) // anatomy.vocabulary
    reads = ((choice.layer, choice.bytes_read - saved) for choice in anatomy.exits)
    return tuple(ExitSummary(layer, read, read / anatomy.target_bytes_read) for layer, read in reads)
