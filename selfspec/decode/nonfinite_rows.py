"""Rows whose logits are not finite: tried once more without a draft, and ended if that does not help.

A draft token may be the cause. Plain decoding might never have read that token, and its NaN spoils other places of the
block as well, since NaN times an attention weight of 0 is NaN. So a row commits the tokens before the first place that
is not finite, which are drawn from finite distributions, and its next round has no draft and reads nothing that the
draft token left. If the logits are not finite again, plain decoding fails there as well, and the row ends.
"""

from __future__ import annotations

from selfspec.decode.batch import Batch
from selfspec.draft import Draft
from selfspec.draft.verdict import Verdict


def scrub_nonfinite_rows(batch: Batch) -> None:
    """Clear what draft tokens left in the cache of the rows that are tried once more."""
    batch.cache.scrub([index for index, row in enumerate(batch.running) if row in batch.nonfinite_rows])


def settle_nonfinite_rows(batch: Batch, draft: Draft, verdict: Verdict) -> None:
    """Note which rows to try once more, and end those whose logits are not finite without a draft."""
    batch.nonfinite_rows = []
    for number, row in verdict.rows.items():
        if row.finite:
            continue
        if draft.length and not row.ended:
            batch.nonfinite_rows.append(number)
        else:
            batch.failed.append(number)
            batch.unfinished.discard(number)
