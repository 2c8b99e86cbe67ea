"""Committing a verdict: tokens are appended, cursors move, rows end. Nothing is decided or counted here."""

from __future__ import annotations

from selfspec.decode.batch import Batch
from selfspec.decode.nonfinite_rows import settle_nonfinite_rows
from selfspec.decode.output import Round, RowRound
from selfspec.draft import Draft
from selfspec.draft.verdict import Verdict


def commit(batch: Batch, draft: Draft, verdict: Verdict) -> Round:
    """Make a verdict final; return what every row of the batch committed."""
    rows = [RowRound((), (), 0)] * batch.size
    for number, row in verdict.rows.items():
        batch.committed[number] += row.tokens
        accepted = row.accepted_of(len(row.tokens))
        rejected = draft.tree.first_branch(row.path[:accepted])
        rows[number] = RowRound(
            tuple(row.tokens), tuple(row.drafted), accepted, tuple(row.drafted[node] for node in rejected)
        )
        if row.ended:
            batch.unfinished.discard(number)
    counts = [len(rows[row].tokens) for row in batch.running]
    if draft.tree.is_chain:
        batch.cache.commit(counts)
    else:
        paths = [verdict.rows[row].path if row in verdict.rows else () for row in batch.running]
        batch.cache.commit_paths([(-1, *path)[:count] for path, count in zip(paths, counts, strict=True)])
    batch.last_tokens = verdict.last_tokens
    settle_nonfinite_rows(batch, draft, verdict)
    batch.drop_finished()
    return Round(tuple(rows), draft.steps)
