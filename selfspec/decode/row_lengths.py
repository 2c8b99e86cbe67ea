"""Draft lengths of single rows: how much of a draft, whose length rows share, is judged in each of them.

Towards the end of a text the draft is as long as the row with most left to generate can use, and what is found without
a model is drafted for all rows where something is for one. Where tokens are drawn, each row takes no more of that than
it would alone (`Batch.row_lengths`): then it draws the same tokens as alone, for places have the same noise.

To any rule a draft ends at a place where q is 0: max(p - 0, 0) is p, and what is judged after it is not accepted. The
length depends on committed tokens alone, so the output stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from selfspec.accept.tree_paths import tree_tables
from selfspec.device import to_device
from selfspec.draft import Draft


def within(draft: Draft, lengths: Sequence[int]) -> Tensor | None:
    """Whether each node is judged in each row, `[rows, nodes]`; None: all are."""
    if min(lengths) == draft.tree.depth:
        return None
    device = draft.tokens.device
    limits = to_device(lengths, device)
    if draft.tree.is_chain:
        return torch.arange(1, draft.length + 1, device=device) <= limits[:, None]
    return tree_tables(draft.tree, device).depths[1:] <= limits[:, None]


def ended(draft: Draft, judged: Tensor, p: Tensor) -> Draft:
    """The draft with a q of zeros where it is not judged.

    Args:
        draft: of the round.
        judged: as `within` gives it, `[rows, nodes]`.
        p: the target's, `[rows, nodes + 1, vocab]`, which q takes its form from where the draft was not drawn.
    """
    probs = draft.probs
    if probs is None:
        probs = torch.zeros_like(p[:, 1:]).scatter_(-1, draft.tokens[..., None], 1.0)
    return replace(draft, probs=probs * judged[..., None])
