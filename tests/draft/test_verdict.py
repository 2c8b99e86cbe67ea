"""What is read off a verdict: statistics count what was committed, the controller learns from what lockstep dropped."""

from __future__ import annotations

import pytest
import torch

from selfspec.decode.output import Stats
from selfspec.draft import Draft
from selfspec.draft.draft import RowVerdict, Verdict

DRAFT = Draft.chain(torch.tensor([[1, 2, 3, 4]] * 3))


def _verdict(accepted: int, committed: int, overlap: tuple[float, ...] = ()) -> Verdict:
    """Row 5 of three running rows accepts some tokens and commits some of its run; the other rows are finished."""
    run = [*range(1, accepted + 1), 9]
    row = RowVerdict(
        drafted=[1, 2, 3, 4],
        path=range(accepted),
        judged=min(accepted + 1, 4),
        tokens=run[:committed],
        dropped=len(run) - committed,
        ended=False,
        finite=True,
        overlap=overlap,
    )
    return Verdict((2, 5, 6), {5: row}, torch.zeros(3, 1, dtype=torch.long))


@pytest.mark.parametrize(
    ("accepted", "committed", "judged", "counted"),
    [
        (4, 5, 4, 4),
        (3, 4, 4, 3),
        (0, 1, 1, 0),
        # Lockstep cuts the row before the place where it rejects, right there, and in a draft that is accepted whole.
        (3, 2, 2, 2),
        (2, 2, 2, 2),
        (4, 1, 1, 1),
    ],
)
def test_statistics_count_the_places_that_were_committed(
    accepted: int, committed: int, judged: int, counted: int
) -> None:
    stats = Stats()
    stats.count(len(DRAFT.tree), DRAFT.length, _verdict(accepted, committed, overlap=(0.5, 0.25, 0.125, 0.0625)))
    assert (stats.rounds, stats.row_rounds, stats.drafted, stats.new_tokens) == (1, 1, 4, committed)
    assert (stats.judged, stats.accepted) == (judged, counted)
    assert stats.judged_per_depth == [1] * judged + [0] * (4 - judged)
    assert stats.overlap == sum((0.5, 0.25, 0.125, 0.0625)[:judged])


@pytest.mark.parametrize(("accepted", "committed", "run"), [(3, 4, 4), (3, 2, 4), (4, 1, 5)])
def test_the_controller_learns_from_dropped_tokens_too(accepted: int, committed: int, run: int) -> None:
    row = _verdict(accepted, committed).rows[5]
    assert (row.run_length, row.judged_of(run), row.accepted_of(run), row.along) == (run, 4, accepted, accepted)
