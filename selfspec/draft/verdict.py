"""The verdict on a draft: how much of it each row accepts, which tokens the row commits, and whether it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowOutcome:
    """Counts the outcome of a round for one unfinished row.

    Attributes:
        judged: draft tokens the target judged.
        accepted: draft tokens accepted, committed or not.
        committed: tokens committed, the bonus or recovered token included.
        dropped: tokens accepted and then dropped to keep rows in lockstep.
        strayed: accepted tokens off the chain that the first nodes of the tree form.
    """

    judged: int
    accepted: int
    committed: int
    dropped: int = 0
    strayed: int = 0


@dataclass(frozen=True)
class RowVerdict:
    """Holds the verdict on one unfinished row.

    A run is the tokens that the rule lets the row commit: the accepted draft tokens and the target's token after them,
    up to the end of the row. Lockstep may drop the last tokens of a run.

    Attributes:
        drafted: its draft tokens, one for each node.
        path: the nodes that the rule accepted, in order.
        judged: number of places the rule judged: those of the accepted nodes, and one where it rejected all children.
        tokens: the part of its run that it commits.
        dropped: number of tokens of its run that lockstep dropped.
        ended: whether the row ends with `tokens`.
        finite: whether the target's logits after the accepted tokens were finite; if not, the run has no token there.
        overlap: for a coupled draft, the diagnostic of `selfspec.decode.judge` at each draft token; else empty.
    """

    drafted: Sequence[int]
    path: Sequence[int]
    judged: int
    tokens: Sequence[int]
    dropped: int
    ended: bool
    finite: bool
    overlap: Sequence[float]

    @property
    def run_length(self) -> int:
        """Length of the run: tokens committed and dropped."""
        return len(self.tokens) + self.dropped

    def accepted_of(self, tokens: int) -> int:
        """Count the accepted draft tokens among the first `tokens` of the run."""
        return min(len(self.path), tokens)

    def judged_of(self, tokens: int) -> int:
        """Count the draft tokens judged for the first `tokens` of the run: accepted ones, and a rejected one if any."""
        return self.judged if tokens > len(self.path) else tokens

    def outcome(self) -> RowOutcome:
        """Return the counts that the controller learns from."""
        accepted = self.accepted_of(self.run_length)
        along = next((place for place, node in enumerate(self.path[:accepted]) if node != place), accepted)
        judged = self.judged_of(self.run_length)
        return RowOutcome(judged, accepted, len(self.tokens), self.dropped, accepted - along)

    def overlap_of(self, tokens: int) -> float:
        """Sum the overlap over the draft tokens judged for the first `tokens` of the run."""
        return sum(self.overlap[: self.judged_of(tokens)])


@dataclass(frozen=True)
class Verdict:
    """Holds the verdict of one round.

    Attributes:
        running: numbers of the rows, in the order in which tensors hold them.
        rows: the verdict on each unfinished row, by its number.
        last_tokens: the last token of each running row after the round, `[rows, 1]`; arbitrary for finished rows.
    """

    running: Sequence[int]
    rows: Mapping[int, RowVerdict]
    last_tokens: Tensor

    def outcomes(self) -> list[RowOutcome | None]:
        """Return the outcome of each running row for the controller, in the order of tensors; None for finished rows.

        The controller also learns from tokens that lockstep dropped: only the other rows decide that they are dropped,
        and their places are drawn again, so their verdicts are valid evidence. Statistics leave them out.
        """
        return [self.rows[row].outcome() if row in self.rows else None for row in self.running]
