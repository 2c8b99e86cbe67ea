"""Drafts of rows that each have a source of their own: chains of different lengths, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from selfspec.device import to_device
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.rows_view import RowsView


def chains(rows: RowsView, tokens: Sequence[Sequence[int]], match_length: int) -> Draft:
    """Draft a chain of these tokens for each running row, as long as it is; none where all are empty."""
    longest = max(map(len, tokens))
    if not longest:
        return rows.no_draft()
    each = zip(tokens, last_known(rows), strict=True)
    filled = [[*row, *[token] * (longest - len(row))] for row, token in each]
    return Draft.chain(
        guesses(rows, filled),
        match_length=match_length,
        row_lengths=tuple(map(len, tokens)),
    )


def guesses(rows: RowsView, tokens: Tensor | Sequence[Sequence[int]]) -> Tensor:
    """Bring draft tokens that come out of a text, `[rows, nodes]`, to the device, cut at what the head can write.

    A text may hold ids that the embedding alone knows, such as those of pictures: the head's last one stands for them.
    """
    return to_device(tokens, rows.last_tokens.device).clamp(max=rows.runner.vocabulary - 1)


def last_known(rows: RowsView) -> list[int]:
    """Return the last token of each running row's text, for places that are not judged; 0 where there is no text."""
    return [next(iter(rows.text(row, rows.text_length(row) - 1)), 0) for row in rows.running]


def lengths_of(rows: RowsView, draft: Draft) -> tuple[int, ...]:
    """Return how many tokens of a draft are meant for each running row."""
    return draft.row_lengths or (draft.length,) * len(rows.running)


def filled_up(rows: RowsView, found: Draft, budget: Budget, propose: Callable[[Budget], Draft]) -> Draft:
    """Return a draft of `chains` with those of another source in the rows that it has nothing for.

    The other source is asked only where some unfinished row needs it, with a budget that names these rows; it may draft
    for all. What it ran is no longer what is verified, so verification starts from tokens.
    """
    taken = lengths_of(rows, found)
    wanting = rows.unfinished if budget.rows is None else rows.unfinished & budget.rows
    needing = frozenset(row for row, length in zip(rows.running, taken, strict=True) if row in wanting and not length)
    if not needing:
        return found
    other = propose(replace(budget, rows=needing))
    if not found.length or not other.length:
        return other if other.length else found
    longest = max(found.length, other.length)
    own = to_device(taken, other.tokens.device)[:, None] > 0
    tokens = guesses(rows, rows.last_tokens).repeat(1, longest)
    for draft, its in ((found, own), (other, ~own)):
        tokens[:, : draft.length] = torch.where(its, draft.tokens, tokens[:, : draft.length])
    drawn = next((draft.probs for draft in (found, other) if draft.probs is not None), None)
    probs = None
    if drawn is not None:
        # What was not drawn has a q that is one-hot.
        probs = drawn.new_zeros(*tokens.shape, drawn.shape[-1]).scatter_(-1, tokens[..., None], 1.0)
        for draft, its in ((found, own), (other, ~own)):
            if draft.probs is not None:
                part = probs[:, : draft.length]
                probs[:, : draft.length] = torch.where(its[..., None], draft.probs, part)
    theirs = lengths_of(rows, other)
    lengths = tuple(length or rest for length, rest in zip(taken, theirs, strict=True))
    return Draft.chain(tokens, probs, steps=other.steps, match_length=other.match_length, row_lengths=lengths)
