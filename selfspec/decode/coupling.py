"""The distributions that a rule judges, of a whole draft or of one place.

Coupled decoding chooses the token of each position with noise that draft and target share, and greedy decoding takes
the best one. Nothing is left to draw then, and the rule judges one-hot distributions: q at the draft's tokens, whatever
they were chosen from, and p at the target's choice. To judge a coupled draft by its real q would be exact, and waste
tokens on which both agree.

How often both of a coupled draft choose the same token depends on how alike p and q are. 1 - TV(p, q), the sum of
min(p, q), is the best acceptance rate of any rule. It is a diagnostic, of coupled chains alone; nothing decides by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.decode.batch import Batch
from selfspec.draft import Draft


@dataclass(frozen=True)
class Effective:
    """What a rule judges.

    Attributes:
        draft: the draft; without probs where its tokens were not drawn.
        p: the target's distributions, `[rows, nodes + 1, vocab]`. Zeros where they are not finite: these reject
            every draft token.
        overlap: 1 - TV(p, q) at each draft token of a coupled chain, `[rows, nodes]`; `[rows, 0]` for other drafts.
    """

    draft: Draft
    p: Tensor
    overlap: Tensor


def effective(batch: Batch, draft: Draft, p: Tensor, finite: Tensor, positions: Tensor) -> Effective:
    """Return the distributions that tokens are really chosen from.

    Args:
        batch: whose sampling and noise are used.
        draft: with the probs that its tokens were chosen from.
        p: as the target's scores give it, `[rows, places, vocab]`.
        finite: whether it is finite, `[rows, places]`.
        positions: of the tokens to be chosen, `[rows or 1, places]`.
    """
    sampling = batch.sampling
    decided = torch.where(finite[..., None], sampling.decide(p, positions, batch.noise), 0.0)
    if not sampling.decided:
        return Effective(sampling.judged(draft), decided, p.new_empty(len(p), 0))
    overlap = p.new_empty(len(p), 0)
    if draft.probs is not None and draft.tree.is_chain:
        overlap = torch.minimum(p[:, : draft.length], draft.probs).sum(-1)
    return Effective(sampling.judged(draft), decided, overlap)
