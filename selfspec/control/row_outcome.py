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
    """

    judged: int
    accepted: int
    committed: int
    dropped: int = 0
