"""Drafts whose rows each have their own source: chains of different lengths, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from selfspec.device import to_device
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.rows_view import RowsView


def chains(rows: RowsView, tokens: Sequence[Sequence[int]], match_length: int) -> Draft:
    """Make a draft with a chain of these tokens for each running row; no draft if all chains are empty."""
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
    """Bring draft tokens from a text, `[rows, nodes]`, to the device, limited to the ids that the head can write.

    A text may hold larger ids, which the embedding alone knows, such as those of pictures; the head's last id replaces
    them.
    """
    return _writable(rows, to_device(tokens, rows.last_tokens.device))


def _writable(rows: RowsView, tokens: Tensor) -> Tensor:
    return tokens.clamp(max=rows.runner.vocabulary - 1)


def last_known(rows: RowsView) -> list[int]:
    """Return the last token of each running row's text, as filler for places that are not judged; 0 without a text."""
    return [next(iter(rows.text(row, rows.text_length(row) - 1)), 0) for row in rows.running]


def lengths_of(rows: RowsView, draft: Draft) -> tuple[int, ...]:
    """Return the number of draft tokens meant for each running row."""
    return draft.row_lengths or (draft.length,) * len(rows.running)


def filled_up(rows: RowsView, found: Draft, budget: Budget, propose: Callable[[Budget], Draft]) -> Draft:
    """Return a draft of `chains`, with chains of another source in the rows that have no tokens.

    The other source is asked only if an unfinished row needs it, with a budget that names these rows; it may draft for
    all rows. Verification starts from tokens, as the other source did not run all of them.
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
    tokens = _writable(rows, rows.last_tokens).repeat(1, longest)
    for draft, its in ((found, own), (other, ~own)):
        tokens[:, : draft.length] = torch.where(its, draft.tokens, tokens[:, : draft.length])
    drawn = next((draft.probs for draft in (found, other) if draft.probs is not None), None)
    probs = None
    if drawn is not None:
        # Tokens that were not drawn have a one-hot q.
        probs = drawn.new_zeros(*tokens.shape, drawn.shape[-1]).scatter_(-1, tokens[..., None], 1.0)
        for draft, its in ((found, own), (other, ~own)):
            if draft.probs is not None:
                part = probs[:, : draft.length]
                probs[:, : draft.length] = torch.where(its[..., None], draft.probs, part)
    theirs = lengths_of(rows, other)
    lengths = tuple(length or rest for length, rest in zip(taken, theirs, strict=True))
    return Draft.chain(tokens, probs, steps=other.steps, match_length=other.match_length, row_lengths=lengths)
