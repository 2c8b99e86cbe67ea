"""The steps of a round but drafting and judging: begin it, verify its draft in one target pass, commit the verdict.

Rows whose logits are not finite are tried once more without a draft, and ended if that does not help. A draft token may
be the cause. Plain decoding might never have read that token, and its NaN spoils other places of the block as well,
since NaN times an attention weight of 0 is NaN. So a row commits the tokens before the first place that is not finite,
which are drawn from finite distributions, and its next round has no draft and reads nothing that the draft token left.
If the logits are not finite again, plain decoding fails there as well, and the row ends.
"""

from __future__ import annotations

import torch

from selfspec.decode.batch import Batch
from selfspec.decode.output import Round, RowRound
from selfspec.draft import Draft, Verdict
from selfspec.draft.draft import Budget
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import LayerPath
from selfspec.runtime.runner import PassResult


def begin_round(batch: Batch) -> Budget:
    """Give a round fresh noise and room in the cache, and say how much may be drafted.

    There is no draft in the round that reads the last embedding of a prompt, nor before a pass of the whole network has
    made the keys and values of a source, nor while the logits of some row are not finite.
    """
    batch.noise.begin_round()
    batch.cache.reserve(batch.longest)
    # What draft tokens left in the cache of rows that are tried once more.
    batch.cache.scrub([index for index, row in enumerate(batch.running) if row in batch.nonfinite_rows])
    source = batch.cache.source
    unread = source is not None and not source.read
    if batch.nonfinite_rows or batch.first_embeddings is not None or unread:
        return Budget.chain(0)
    wanted = max(map(batch.remaining, batch.unfinished))
    return batch.controller.budget(wanted, [row in batch.unfinished for row in batch.running])


def verify(batch: Batch, draft: Draft) -> PassResult:
    """Run the target over the last committed token and the draft.

    Where the draft computed exact states up to some sublayer, its last tokens, which no draft step has read, are
    brought up to there as well, and the target pass resumes there. Where prompts are embeddings, the first round reads
    the last one of each, and has no draft.

    Returns:
        The target's logits, `[rows, drafted + 1, vocab]`, and what drafters asked for.
    """
    if batch.first_embeddings is not None:
        embeddings, batch.first_embeddings = batch.first_embeddings, None
        return PassResult(batch.runner.logits_of_embeddings(embeddings))
    block, target = torch.cat([batch.last_tokens, draft.tokens], 1), LayerPath.full(batch.runner.depth)
    batch.cache.open(draft.block)
    if draft.behind is not None:
        result = draft.behind.run(batch.runner, block, draft.tree, batch.taps)
        # What lies behind the draft is of no use any more.
        batch.cache.open(draft.tree)
        return result
    # A pass that resumes has no states of earlier layers.
    if draft.resume is None or batch.taps:
        return batch.runner.logits(target, block, taps=batch.taps)
    unread = block[:, draft.resume.read :]
    tail = batch.runner.states(LayerPath.up_to(batch.runner.depth, draft.resume.start), unread, draft.resume.read - 1)
    assert tail is not None
    entering = ExactStates.concatenated([draft.resume.states, tail])
    return batch.runner.logits(target.resumed_at(draft.resume.start), block, entering)


def commit(batch: Batch, draft: Draft, verdict: Verdict) -> Round:
    """Make a verdict final; return what every row of the batch committed."""
    for group in batch.groups:
        group.ahead = False
    rows = [RowRound((), (), 0)] * batch.size
    for number, row in verdict.rows.items():
        batch.committed[number] += row.tokens
        accepted = row.accepted_of(len(row.tokens))
        rejected = draft.tree.first_branch(row.path[:accepted])
        rows[number] = RowRound(
            tuple(row.tokens), tuple(row.drafted), accepted, tuple(row.drafted[node] for node in rejected)
        )
        if row.ended:
            batch.end(number)
    counts = [len(rows[row].tokens) for row in batch.running]
    if draft.tree.is_chain:
        batch.cache.commit(counts)
    else:
        paths = [verdict.rows[row].path if row in verdict.rows else () for row in batch.running]
        batch.cache.commit_paths([(-1, *path)[:count] for path, count in zip(paths, counts, strict=True)])
    batch.last_tokens = verdict.last_tokens
    _settle_nonfinite_rows(batch, draft, verdict)
    return Round(tuple(rows), draft.steps)


def _settle_nonfinite_rows(batch: Batch, draft: Draft, verdict: Verdict) -> None:
    """Note which rows to try once more, and end those whose logits are not finite without a draft."""
    batch.nonfinite_rows = []
    for number, row in verdict.rows.items():
        if row.finite:
            continue
        if len(draft.block) and not row.ended:
            batch.nonfinite_rows.append(number)
        else:
            batch.fail(number)
