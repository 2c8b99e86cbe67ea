"""Verifying a draft: one target pass over the last committed token and all draft tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.decode.batch import Batch
from selfspec.draft import Draft
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import LayerPath


def verify(batch: Batch, draft: Draft) -> Tensor:
    """Run the target over the last committed token and the draft.

    Where the draft computed exact states up to some sublayer, its last tokens, which no draft step has read, are
    brought up to there as well, and the target pass resumes there. Where prompts are embeddings, the first round reads
    the last one of each, and has no draft.

    Returns:
        The target's logits, `[rows, drafted + 1, vocab]`.
    """
    if batch.first_embeddings is not None:
        embeddings, batch.first_embeddings = batch.first_embeddings, None
        return batch.runner.logits_of_embeddings(embeddings)
    batch.cache.open(draft.tree)
    target = LayerPath.full(batch.runner.depth)
    block = torch.cat([batch.last_tokens, draft.tokens], 1)
    if draft.resume is None:
        return batch.runner.logits(target, block).logits
    unread = block[:, draft.resume.read :]
    tail = batch.runner.states(LayerPath.up_to(batch.runner.depth, draft.resume.start), unread, draft.resume.read - 1)
    assert tail is not None
    entering = ExactStates.concatenated([draft.resume.states, tail])
    return batch.runner.logits(target.resumed_at(draft.resume.start), block, entering).logits
