"""Drafts of rows that each have a source of their own: chains of different lengths, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from selfspec.draft.draft import Draft

if TYPE_CHECKING:
    from selfspec.decode.batch import Batch


def chains(batch: Batch, rows: Sequence[Sequence[int]], match_length: int) -> Draft:
    """Draft a chain for each running row, as long as it is; none where all are empty.

    Args:
        batch: before the round.
        rows: the tokens of each running row.
        match_length: see `Draft`.
    """
    longest = max(map(len, rows))
    if not longest:
        return batch.no_draft()
    last = batch.last_tokens[:, 0].tolist()
    tokens = [[*row, *[token] * (longest - len(row))] for row, token in zip(rows, last, strict=True)]
    return Draft.chain(
        torch.tensor(tokens, device=batch.last_tokens.device),
        match_length=match_length,
        row_lengths=tuple(map(len, rows)),
    )


def filled_up(batch: Batch, found: Draft, propose: Callable[[], Draft]) -> Draft:
    """Return a draft of chains with those of another source in the rows that it has nothing for.

    What the other source ran is no longer what is verified, so verification starts from tokens.

    Args:
        batch: before the round.
        found: chains, as `chains` gives them.
        propose: drafts chains by the other source, for all rows; asked only where some unfinished row needs it.
    """
    taken = found.row_lengths or (0,) * len(batch.running)
    if all(length or row not in batch.unfinished for row, length in zip(batch.running, taken, strict=True)):
        return found
    other = propose()
    if not found.length or not other.length:
        return other if other.length else found
    longest = max(found.length, other.length)
    own = torch.tensor(taken, device=other.tokens.device)[:, None] > 0
    tokens = batch.last_tokens.repeat(1, longest)
    for draft, rows in ((found, own), (other, ~own)):
        tokens[:, : draft.length] = torch.where(rows, draft.tokens, tokens[:, : draft.length])
    probs = other.probs
    if probs is not None:
        # Nothing was drawn but the other source's tokens.
        q = probs.new_zeros(*tokens.shape, probs.shape[-1]).scatter_(-1, tokens[..., None], 1.0)
        q[:, : other.length] = torch.where(own[..., None], q[:, : other.length], probs)
        probs = q
    theirs = other.row_lengths or (other.length,) * len(taken)
    lengths = tuple(length or rest for length, rest in zip(taken, theirs, strict=True))
    return Draft.chain(tokens, probs, steps=other.steps, match_length=other.match_length, row_lengths=lengths)
