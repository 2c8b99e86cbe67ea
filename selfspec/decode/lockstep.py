"""Lockstep: all rows of a batch commit as many tokens of a round as the slowest row does.

Some processors and stopping criteria need it (`Batch.needs_lockstep`). Otherwise the controller chooses it where all
rows are at one place, because a pass over rows at different places needs a mask and scattered writes.

Lockstep leaves the output exact. Let T be the number of tokens that the rule lets a row commit, and M the number that
the other rows allow. After k tokens and given T > k, the next token is distributed as p: over all T it is, and given
T <= k it is drawn again in the next round. M depends on other drafts and other draws, and says nothing about that
token; so given T > k and M > k it is distributed as p too, and is drawn again otherwise. Rows share their draft length,
which may depend on this row's draft tokens as well. But under the rules here the chance that k tokens of a draft are
accepted does not depend on how the draft continues, so what the other rows allow does not either. To drop tokens for
what they are, or for what was accepted in their own row, would bias the output.

tests/accept/test_cut.py proves this in closed form, tests/decode/test_lockstep.py by samples of the whole loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.decode.batch import Batch
from selfspec.draft import Draft


def lockstep_limit(batch: Batch, draft: Draft, runs: Sequence[Sequence[int]]) -> int:
    """Return the most tokens that a row commits of this round.

    Args:
        batch: before the round is committed.
        draft: of the round.
        runs: of each unfinished row, the accepted tokens and the target's token after them. A row whose logits are not
            finite may have none; it does not hold up the others if the controller chose lockstep.
    """
    whole = draft.length + 1
    if not batch.in_lockstep:
        return whole
    return min((len(run) for run in runs if run or batch.needs_lockstep), default=whole)
