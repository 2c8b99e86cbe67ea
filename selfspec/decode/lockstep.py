"""Rows of a batch kept in lockstep: all commit as many tokens of a round as the slowest row does."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.decode.batch import Batch
from selfspec.draft import Draft


def lockstep_limit(batch: Batch, draft: Draft, runs: Sequence[Sequence[int]]) -> int:
    """The most tokens that a row commits of this round.

    Processors and stopping criteria with memory need all unfinished rows at one length, in every round
    (`Batch.lockstep`). Otherwise lockstep is the control's choice, where all rows are at one place: a pass over rows at
    different places needs a mask and scattered writes.

    That leaves the output exact. Let T be the number of tokens that the rule lets a row commit, and M what the other
    rows allow it. After k tokens and given T > k, the next one is distributed as p: over all T it is, and given T <= k
    it is drawn afresh. M depends on other drafts and other draws, so it says nothing about that token: given T > k and
    M > k it is distributed as p too, and else drawn afresh. Rows share their draft length, which may depend on the
    draft tokens of this row as well; but with the rules here the chance that k tokens of a draft are accepted does not
    depend on how the draft continues, so neither does what the other rows allow. To drop tokens for what they are, or
    for what was accepted in their own row, would bias the output.

    Args:
        batch: before the round is committed.
        draft: of the round.
        runs: of each unfinished row, the accepted tokens and the target's own after them. A row whose logits are not
            finite may have none; if the control chose lockstep, it does not hold up the others.
    """
    whole = draft.length + 1
    if batch.needs_lockstep:
        return min((len(run) for run in runs), default=whole)
    places = {place for row, place in zip(batch.running, batch.cache.seq_lens, strict=True) if row in batch.unfinished}
    if len(places) > 1 or not batch.controller.keeps_step():
        return whole
    return min((len(run) for run in runs if run), default=whole)
