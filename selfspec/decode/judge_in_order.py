"""Judge a draft place by place, for logits processors with memory.

Such a processor is called once for each committed token, in order, with all rows of its call at one length, as in plain
decoding; it never sees a rejected token. Each place is judged as a draft of one token, so any lossless rule becomes
token-level rejection sampling, which is exact for any q that the draft was drawn from. Rows are in lockstep: the round
ends where the first row rejects.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from selfspec.accept import Rule
from selfspec.decode.accept_draws import accept, effective
from selfspec.decode.batch import Batch
from selfspec.draft import Draft
from selfspec.draft.verdict import RowVerdict, Verdict
from selfspec.errors import UnsupportedOptionError


@dataclass
class _Row:
    """An unfinished row of the round."""

    drafted: list[int]
    tokens: list[int] = field(default_factory=list)
    accepted: int = 0
    ended: bool = False
    finite: bool = True
    overlap: list[float] = field(default_factory=list)

    def verdict(self) -> RowVerdict:
        judged = min(self.accepted + 1, len(self.drafted))
        return RowVerdict(
            self.drafted, range(self.accepted), judged, self.tokens, 0, self.ended, self.finite, self.overlap
        )


def judge_in_order(batch: Batch, draft: Draft, logits: Tensor, rule: Rule) -> Verdict:
    """Judge a draft of one group place by place: processors, rule, then stopping criteria, as in plain decoding.

    Waits for the device at each place. Arguments as in `judge`.

    Raises:
        UnsupportedOptionError: the draft is no chain.
    """
    if not draft.tree.is_chain:
        raise UnsupportedOptionError(
            "logits processors and stopping criteria with memory judge chains, and this drafter drafts trees; draft a "
            "chain, or give those that remember nothing an attribute `stateless = True`"
        )
    sampling, sequences = batch.groups[0].sampling, batch.groups[0].sequences
    sampling.forget_draft()
    drafted = draft.tokens.tolist()
    rows = {row: _Row(drafted[index]) for index, row in enumerate(sequences.running) if row in sequences.unfinished}
    finite = logits.amax(-1).isfinite().tolist()
    for place in range(draft.length + 1):
        going = [index for index, row in enumerate(sequences.running) if row in rows and not rows[row].ended]
        broken = [index for index in going if not finite[index][place]]
        if draft.length and broken:
            # A draft token may be the cause, so judge the place again in a round without a draft.
            for index in broken:
                rows[sequences.running[index]].finite = False
            break
        ids = sequences.followed_by(_runs(batch, rows))
        judged = _judge_place(batch, draft, logits, rule, ids, place)
        columns = torch.stack([judged.token, judged.accepted, judged.finite], 1)
        # Transfer everything at once: doubles hold every token id exactly.
        numbers = torch.cat([columns.double(), judged.overlap.double()], 1).tolist()
        for index in going:
            token, accepted, is_finite, *overlap = numbers[index]
            row = rows[sequences.running[index]]
            row.finite = bool(is_finite) and (sampling.mends or index not in broken)
            row.ended = not row.finite
            if row.finite:
                row.tokens.append(int(token))
                row.accepted += int(accepted)
                row.overlap += overlap
        _stop(batch, rows, judged.scores, logits[:, place : place + 1])
        if not all(row.ended or row.accepted > place for row in rows.values()):
            break
        if all(row.ended for row in rows.values()):
            break
    verdicts = {number: row.verdict() for number, row in rows.items()}
    return Verdict(tuple(batch.running), verdicts, _last(batch, rows))


@dataclass(frozen=True)
class _Place:
    """The verdict on one place.

    Attributes:
        token: the token of each running row, `[rows]`.
        accepted: 1 where it is the draft's, else 0, `[rows]`.
        finite: whether processors left a token to choose, `[rows]`.
        overlap: see `Effective`, `[rows, 1 or 0]`.
        scores: the logits after processors, `[rows, 1, vocab]`.
    """

    token: Tensor
    accepted: Tensor
    finite: Tensor
    overlap: Tensor
    scores: Tensor


def _judge_place(batch: Batch, draft: Draft, logits: Tensor, rule: Rule, ids: Tensor, place: int) -> _Place:
    sampling, running = batch.sampling, batch.running
    whole = torch.zeros(batch.size, logits.shape[-1], device=logits.device)
    whole[running] = logits[:, place].float()
    scores = batch.groups[0].sampling.next_scores(ids, whole)[running][:, None]
    p = sampling.probabilities(scores)
    finite = p.sum(-1).isfinite()
    # The rule sees a draft of one token, or of none at the last place. The token after it is never used.
    token = draft.tokens[:, place : place + 1]
    probs = None if draft.probs is None else draft.probs[:, place : place + 1]
    positions = batch.cache.positions(place + 1)[:, place:] + 1
    seen = effective(batch, Draft.chain(token, probs), p, finite, positions)
    places = token.shape[1] + 1
    seen = replace(seen, p=seen.p.expand(-1, places, -1))
    accepted, own = accept(batch, seen, logits[:, place : place + places], rule, first=place)
    chosen = torch.where(accepted > 0, token[:, 0], own) if token.shape[1] else own
    return _Place(chosen, accepted, finite[:, 0], seen.overlap, scores)


def _stop(batch: Batch, rows: dict[int, _Row], scores: Tensor, logits: Tensor) -> None:
    """Record the scores of the place just judged, and end the rows that end there."""
    grown = {number: row for number, row in rows.items() if not row.ended}
    starts = [len(tokens) for tokens in batch.committed]
    for number, row in rows.items():
        starts[number] += len(row.tokens) - (number in grown)
    group = batch.groups[0]
    kept = group.records.keep(
        scores, logits, batch.running, starts, [int(number in grown) for number in range(len(starts))]
    )
    for number, row in grown.items():
        row.ended = group.stopping.ends(starts[number] + 1, row.tokens[-1])
    if group.stopping.criteria and grown:
        verdicts = group.stopping.criteria(group.sequences.followed_by(_runs(batch, rows)), kept).tolist()
        count = max(starts[number] for number in grown) + 1
        for number in group.stopping.ended(group.sequences, [each for each in grown if verdicts[each]], count):
            rows[number].ended = True


def _runs(batch: Batch, rows: dict[int, _Row]) -> list[list[int]]:
    return [rows[number].tokens if number in rows else [] for number in range(batch.size)]


def _last(batch: Batch, rows: dict[int, _Row]) -> Tensor:
    """Return the last token of each running row, `[rows, 1]`."""
    before = batch.last_tokens[:, 0].tolist()
    tokens = [rows[row].tokens if row in rows else [] for row in batch.running]
    last = [run[-1] if run else token for run, token in zip(tokens, before, strict=True)]
    return torch.tensor(last, device=batch.last_tokens.device)[:, None]
