"""Judging rows of which some have processors with memory: those one by one and place by place, all others together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from selfspec.accept import Rule
from selfspec.decode.batch import Batch
from selfspec.decode.judge import judge_together
from selfspec.decode.judge_in_order import judge_in_order
from selfspec.decode.rows.batch import RowsBatch
from selfspec.draft import Draft
from selfspec.draft.verdict import RowVerdict, Verdict


def judge_rows(batch: Batch, draft: Draft, logits: Tensor, rule: Rule) -> Verdict:
    """Judge a draft; arguments as in `judge_together`.

    Where a processor with memory raises, its row notes the error and ends with nothing of the round.
    """
    assert isinstance(batch, RowsBatch)
    for row in batch.rows:
        # What went wrong at a draft token of the last round may not come again.
        row.error = None
    in_order = [index for index, each in enumerate(batch.rows) if each.sampling.in_order]
    if not in_order:
        return judge_together(batch, draft, logits, rule)
    found: dict[int, RowVerdict] = {}
    last_tokens = batch.last_tokens.clone()
    together = [index for index in batch.running if index not in in_order]
    if together:
        verdict = judge_together(batch.part(together), _of_rows(draft, together), logits[together], rule)
        found |= {together[number]: row for number, row in verdict.rows.items()}
        last_tokens[together] = verdict.last_tokens
    for index in in_order:
        try:
            verdict = judge_in_order(batch.alone(index), _of_rows(draft, [index]), logits[index : index + 1], rule)
        except Exception as error:
            batch.rows[index].error = error
            drafted = draft.tokens[index].tolist()
            found[index] = RowVerdict(drafted, (), 0, [], 0, ended=True, finite=True, overlap=[])
        else:
            found[index] = verdict.rows[0]
            last_tokens[index] = verdict.last_tokens[0]
    return Verdict(tuple(batch.running), {index: found[index] for index in sorted(found)}, last_tokens)


def _of_rows(draft: Draft, rows: Sequence[int]) -> Draft:
    """The draft of some rows."""
    indices = list(rows)
    return replace(
        draft,
        tokens=draft.tokens[indices],
        probs=None if draft.probs is None else draft.probs[indices],
        row_lengths=None if draft.row_lengths is None else tuple(draft.row_lengths[row] for row in indices),
    )
