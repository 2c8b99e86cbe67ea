"""Proposing a draft, as long as the controller allows; none where no draft can be verified."""

from __future__ import annotations

from selfspec.decode.batch import Batch
from selfspec.decode.nonfinite_rows import scrub_nonfinite_rows
from selfspec.draft import Draft, Proposer


def propose(batch: Batch, proposer: Proposer | None) -> Draft:
    """Begin a round: give it fresh noise and room in the cache, and let the proposer draft.

    There is no draft without a proposer, nor in the round that reads the last embedding of a prompt, nor while the
    logits of some row are not finite.
    """
    batch.noise.begin_round()
    batch.cache.reserve(batch.longest)
    scrub_nonfinite_rows(batch)
    if proposer is None or batch.nonfinite_rows or batch.first_embeddings is not None:
        return batch.no_draft()
    wanted = max(map(batch.remaining, batch.unfinished))
    budget = batch.controller.budget(wanted, [row in batch.unfinished for row in batch.running])
    return proposer.propose(batch, budget) if budget.depth else batch.no_draft()
