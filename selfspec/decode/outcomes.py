"""What the controller learns from a round: what became of the draft in every row.

It learns from tokens that lockstep dropped, too. They are dropped for what other rows accepted, and their places are
drawn afresh, so their verdicts are evidence as good as any. Statistics, which count what was committed, leave them out.
"""

from __future__ import annotations

from selfspec.control import RowOutcome
from selfspec.decode.verdict import RowVerdict, Verdict


def row_outcomes(verdict: Verdict) -> list[RowOutcome | None]:
    """Return what became of each running row, in the order in which tensors hold them; None for finished rows."""
    return [None if row not in verdict.rows else _outcome(verdict.rows[row]) for row in verdict.running]


def _outcome(row: RowVerdict) -> RowOutcome:
    return RowOutcome(row.judged_of(row.run_length), row.accepted_of(row.run_length), len(row.tokens), row.dropped)
