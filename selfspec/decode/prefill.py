"""Prefill: compute the prompts' keys, values and states, and compare draft and target on the prompt.

An early exit runs the first layers of the target. So one pass over the prompt gives the states of both, and the head
reads the last tokens of each. This compares draft and target before the first round, at less than the cost of a
rejected draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.cache.transfer import load_past
from selfspec.control import Evidence
from selfspec.decode.batch import Batch
from selfspec.decode.request import Request
from selfspec.draft import Proposer
from selfspec.draft.drafter import Exit

# The most tokens of the prompt that are compared, and the fewest that give evidence.
_MOST, _FEWEST = 32, 4


def prefill(batch: Batch, request: Request, proposer: Proposer | None) -> None:
    """Fill the cache with each prompt except its last token, which the first round reads.

    Rows are stored without their padding: each is moved to the left, and slots after it are never read. Tokens that a
    past holds are not computed again.

    Args:
        batch: before its first round.
        request: the prompts, and the past.
        proposer: compared with the target on the prompt if it has an early exit and the controller asks for evidence.
    """
    if request.past is not None and not request.anew:
        load_past(request.past, batch.cache, request.mask)
    unread = [length - 1 - known for length, known in zip(request.lengths, batch.cache.seq_lens, strict=True)]
    if max(unread) == 0:
        return
    batch.cache.reserve(max(request.lengths))
    prompts = torch.zeros_like(request.read[:, : max(unread)])
    columns = request.mask[:, -request.read.shape[1] :]
    for row, count in enumerate(unread):
        prompts[row, :count] = request.read[row, columns[row].nonzero().flatten()[-1 - count : -1]]
    reading = Prefill(batch, prompts, unread)
    early_exit = None if proposer is None or request.embeddings else proposer.early_exit
    if early_exit is not None and _gives_evidence(batch, unread):
        batch.controller.learn_prompt(prefill_with_evidence(batch, early_exit, reading.tokens))
        batch.cache.commit(unread)
        return
    while reading.left:
        reading.read(batch.prefill_width)


class Prefill:
    """Reads the prompts of a batch into its cache, piece by piece.

    Args:
        batch: before its first round.
        tokens: ids `[rows, tokens]` or embeddings `[rows, tokens, hidden]`, from the left.
        counts: number of tokens of each row.
        at_once: whether one pass reads all columns, also those after a row's tokens.
    """

    def __init__(self, batch: Batch, tokens: Tensor, counts: Sequence[int], at_once: bool = False) -> None:
        self.batch = batch
        self.tokens = tokens.to(batch.last_tokens.device)
        self._counts = counts
        self._at_once = at_once
        self._read = 0

    @property
    def left(self) -> int:
        """Number of tokens of the longest row that are not read yet."""
        return max(self._counts) - self._read

    @torch.no_grad()
    def read(self, most: int | None) -> int:
        """Read the next piece, at most `most` tokens of each row (None: any number); return how many were read."""
        if not self.left:
            return 0
        batch, start = self.batch, self._read
        width = self.tokens.shape[1]
        if not self._at_once:
            width = batch.cache.prefill_widths([max(count - start, 0) for count in self._counts], most)[0]
        counts = [min(max(count - start, 0), width) for count in self._counts]
        features = batch.runner.prefill(self.tokens[:, start : start + width], counts, batch.taps)
        for proposer in batch.proposers.values():
            proposer.read_prompt(batch, counts, features)
        batch.cache.commit(counts)
        self._read += max(counts)
        return max(counts)


def prefill_with_evidence(batch: Batch, early_exit: Exit, prompts: Tensor) -> Evidence:
    """Run the prompts through the cache, and compare draft and target on their last tokens.

    Args:
        batch: with empty slots for the tokens. Its cursors do not move.
        early_exit: where the draft leaves the network.
        prompts: `[rows, tokens]`.
    """
    draft, target = batch.runner.compare(early_exit.layer, early_exit.head, prompts, _MOST)
    q, p = (batch.sampling.scores(each).softmax(-1) for each in (draft, target))
    chances = torch.minimum(p, q).sum(-1)
    if batch.sampling.greedy:
        # On few tokens, the overlap of p and q is as good evidence as the equality of their likeliest tokens.
        chances = (chances + (p.argmax(-1) == q.argmax(-1))) / 2
    table = torch.stack([q.amax(-1), chances]).nan_to_num(0.0).flatten(1).tolist()
    return Evidence(tuple(table[0]), tuple(table[1]))


def _gives_evidence(batch: Batch, unread: Sequence[int]) -> bool:
    """Return whether the controller asks for evidence and a prefill of `unread` tokens of each row can give it."""
    return (
        batch.controller.judges_prompt
        and not batch.sampling.reads_prefixes
        and not batch.taps
        and batch.cache.rolls_back_by_cursor
        and len(set(unread)) == 1
        and unread[0] >= _FEWEST
        and (batch.prefill_width is None or unread[0] <= batch.prefill_width)
        and (unread[0] <= _MOST or batch.runner.keeps_last_logits)
    )
