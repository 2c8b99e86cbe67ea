"""What a round did for one row: a file that imports nothing, as errors carry verdicts and everything imports errors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowOutcome:
    """The outcome of a round for one unfinished row.

    Attributes:
        judged: draft tokens the target judged.
        accepted: draft tokens accepted, committed or not.
        committed: tokens committed, the bonus or recovered token included.
        dropped: tokens accepted and then dropped to keep rows in lockstep.
        strayed: accepted tokens off the first nodes of the tree, of which each is the child of the one before it.
    """

    judged: int
    accepted: int
    committed: int
    dropped: int = 0
    strayed: int = 0
