"""What a draft is worth on the prompt: its early exit beside the target, both read off the passes of the prefill.

An exit computes of a prompt what the target computes first. So the prefill runs in two parts, and the head over the
last tokens of the prompt for each. That shows what a draft is worth before the first round, for less than a failed
round costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.decode.sequences import Prefixes
from selfspec.model.layer_path import LayerPath

if TYPE_CHECKING:
    from selfspec.decode.batch import Batch
    from selfspec.draft.drafter import Drafter

# Tokens of the prompt that are looked at, and the fewest that say anything.
_MOST, _FEWEST = 32, 4


@dataclass(frozen=True)
class Evidence:
    """A draft against the target where the text is known.

    Attributes:
        confidences: the largest probability of q at each token of the prompt that was looked at.
        chances: the chance that a draft token there is accepted: 1 - TV(p, q), for greedy decoding the mean of that
            and of whether p and q have the same best token.
    """

    confidences: tuple[float, ...]
    chances: tuple[float, ...]


def can_show(batch: Batch, drafter: Drafter, unread: Sequence[int]) -> bool:
    """Whether a prefill of so many tokens of each row can show what the draft is worth, and the control asks for it."""
    return (
        batch.controller.judges_prompt
        and drafter.exit_path(batch.runner.depth) is not None
        and not batch.sampling.reads_prefixes
        and batch.cache.rolls_back_by_cursor
        and len(set(unread)) == 1
        and unread[0] >= _FEWEST
        and (unread[0] <= _MOST or batch.runner.keeps_last_logits)
    )


def prefill_with_evidence(batch: Batch, drafter: Drafter, prompts: Tensor) -> Evidence:
    """Read tokens of prompts for what they leave in the cache, and compare the draft with the target on the way.

    Args:
        batch: with empty slots for the tokens.
        drafter: leaves the network early.
        prompts: `[rows, tokens]`.

    Returns:
        What was seen. The cursors stay where they are.
    """
    exit_path = drafter.exit_path(batch.runner.depth)
    assert exit_path is not None
    path, start, head = exit_path.path, exit_path.start, exit_path.head
    drafted = batch.runner.last_logits(path, prompts, _MOST, head=head)
    assert drafted.states is not None
    target = LayerPath.full(batch.runner.depth).resumed_at(start)
    logits = batch.runner.last_logits(target, prompts, _MOST, entering=drafted.states).logits
    q, p = (batch.sampling.scores(each, Prefixes(batch.sequences)).softmax(-1) for each in (drafted.logits, logits))
    chances = torch.minimum(p, q).sum(-1)
    if batch.sampling.greedy:
        # Of few tokens, how far two distributions overlap says as much as whether their best tokens are the same.
        chances = (chances + (p.argmax(-1) == q.argmax(-1))) / 2
    table = torch.stack([q.amax(-1), chances]).nan_to_num(0.0).flatten(1).tolist()
    return Evidence(tuple(table[0]), tuple(table[1]))
