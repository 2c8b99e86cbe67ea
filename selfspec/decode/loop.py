"""THE loop: prefill, draft, verify, accept, commit. Plain decoding is its draft-length-0 case."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from selfspec.accept import Rule
from selfspec.cache.transfer import can_store, load_past, store_past
from selfspec.control import RowOutcome
from selfspec.decode.batch import Batch
from selfspec.decode.evidence import can_show, prefill_with_evidence
from selfspec.decode.judge import Verdict, judge_together
from selfspec.decode.judge_in_order import judge_in_order
from selfspec.decode.output import Round, RowRound
from selfspec.decode.request import Request
from selfspec.decode.stats import PhaseClock, Stats
from selfspec.draft import Draft, Drafter
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import LayerPath


@torch.no_grad()
def rounds(
    batch: Batch, request: Request, drafter: Drafter | None, rule: Rule, stats: Stats
) -> Generator[Round, None, None]:
    """Generate, round by round.

    Args:
        batch: of a generation that has not begun; every round moves it on.
        request: what was asked for.
        drafter: proposes tokens; None decodes plainly.
        rule: judges drafts.
        stats: counts, filled in as the rounds go.

    Yields:
        What each round committed.
    """
    clock = PhaseClock(batch.last_tokens.device)
    judge = judge_in_order if batch.sampling.in_order else judge_together
    try:
        with clock.phase("prefill"):
            prefill(batch, request, drafter)
        while batch.unfinished:
            batch.cache.reserve(batch.longest)
            batch.cache.scrub([index for index, row in enumerate(batch.running) if row in batch.nonfinite_rows])
            without = drafter is None or batch.nonfinite_rows or batch.first_embeddings is not None
            length = 0 if without else choose_length(batch, request)
            with clock.phase("draft"):
                draft = drafter.draft(batch, length) if drafter and length else batch.no_draft()
            with clock.phase("verify"):
                logits = verify(batch, draft)
            with clock.phase("accept"):
                verdict = judge(batch, request.stopping, draft, logits, rule)
            with clock.phase("commit"):
                committed = commit(batch, draft, verdict, stats)
            yield committed
        if batch.past is not None and can_store(batch.cache):
            store_past(batch.cache, batch.past, request.mask)
    finally:
        stats.cache_bytes = batch.cache.most_bytes
        stats.seconds = clock.seconds()


def prefill(batch: Batch, request: Request, drafter: Drafter | None) -> None:
    """Fill the cache with each prompt but its last token, which the first round reads.

    Where that can show what the draft is worth, the control is told: see `selfspec.decode.evidence`.

    Rows are stored without their padding: each is moved to the left, and what then stands behind it is scrap. What a
    past holds is not computed again.
    """
    if request.past is not None:
        load_past(request.past, batch.cache, request.mask)
    unread = [length - 1 - known for length, known in zip(request.lengths, batch.cache.seq_lens, strict=True)]
    if max(unread) == 0:
        return
    batch.cache.reserve(max(request.lengths))
    prompts = torch.zeros_like(request.read[:, : max(unread)])
    columns = request.mask[:, -request.read.shape[1] :]
    for row, count in enumerate(unread):
        prompts[row, :count] = request.read[row, columns[row].nonzero().flatten()[-1 - count : -1]]
    prompts = prompts.to(batch.last_tokens.device)
    if drafter is not None and not request.embeddings and can_show(batch, drafter, unread):
        batch.controller.learn_prompt(prefill_with_evidence(batch, drafter, prompts))
        batch.cache.commit(unread)
        return
    start = 0
    for width in batch.cache.prefill_widths(unread):
        counts = [min(max(count - start, 0), width) for count in unread]
        batch.runner.prefill(prompts[:, start : start + width], counts)
        batch.cache.commit(counts)
        start += width


def choose_length(batch: Batch, request: Request) -> int:
    """The most tokens to draft in the round that begins."""
    remaining = max(
        request.stopping.max_new_tokens - len(tokens)
        for row, tokens in enumerate(batch.committed)
        if row in batch.unfinished
    )
    return batch.controller.choose(remaining, [row in batch.unfinished for row in batch.running])


def verify(batch: Batch, draft: Draft) -> Tensor:
    """One target pass over the last committed token and the draft; logits `[batch, drafted + 1, vocab]`.

    Where the draft's work is exact up to some sublayer, its last tokens, which no draft step has read, are brought up
    to there too, and the target pass goes on from there with the states of all tokens. Where prompts were given as
    embeddings, the first round reads the last of these, and has no draft.
    """
    if batch.first_embeddings is not None:
        opening, batch.first_embeddings = batch.first_embeddings, None
        return batch.runner.logits_of_embeddings(opening)
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


def commit(batch: Batch, draft: Draft, verdict: Verdict, stats: Stats) -> Round:
    """Make a verdict final: append tokens, move the cursors, count."""
    rows = [RowRound((), (), 0)] * batch.size
    doubted: list[int] = []
    outcomes: dict[int, RowOutcome] = {}
    for row, judged in verdict.rows.items():
        count = len(judged.tokens)
        batch.committed[row] += judged.tokens
        if not judged.finite:
            (batch.failed if judged.ended or not draft.length else doubted).append(row)
        if judged.ended or row in batch.failed:
            batch.unfinished.discard(row)
        # Committed tokens are counted: a place counts by whether the cut lies behind it, not by its verdict. The
        # control learns from what was cut off too, since what comes there is drawn afresh.
        accepted = judged.accepted_of(count)
        stats.count_row(draft.length, judged.judged_of(count), accepted, count, judged.overlap_of(count))
        uncut = count + judged.dropped
        outcomes[row] = RowOutcome(judged.judged_of(uncut), judged.accepted_of(uncut), count, judged.dropped)
        rows[row] = RowRound(tuple(judged.tokens), tuple(judged.drafted), accepted)
    batch.controller.learn(draft, [outcomes.get(row) for row in batch.running])
    stats.rounds += 1
    batch.cache.commit([len(rows[row].tokens) for row in batch.running])
    batch.nonfinite_rows = doubted
    batch.last_tokens = verdict.last
    batch.drop_finished()
    return Round(tuple(rows), draft.steps)
