"""THE loop: prefill, draft, verify, accept, commit. Plain decoding is its draft-length-0 case."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from selfspec.accept import Rule
from selfspec.cache.transfer import can_store, load_past, store_past
from selfspec.control import RowOutcome
from selfspec.decode.batch import State
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
    state: State, request: Request, drafter: Drafter | None, rule: Rule, stats: Stats
) -> Generator[Round, None, None]:
    """Generate, round by round.

    Args:
        state: of a generation that has not begun; every round moves it on.
        request: what was asked for.
        drafter: proposes tokens; None decodes plainly.
        rule: judges drafts.
        stats: counts, filled in as the rounds go.

    Yields:
        What each round committed.
    """
    clock = PhaseClock(state.last.device)
    judge = judge_in_order if state.sampling.in_order else judge_together
    try:
        with clock.phase("prefill"):
            prefill(state, request, drafter)
        while any(state.live):
            state.cache.reserve(state.longest)
            state.cache.scrub([index for index, row in enumerate(state.text.rows) if row in state.doubted])
            without = drafter is None or state.doubted or state.opening is not None
            length = 0 if without else choose_length(state, request)
            with clock.phase("draft"):
                draft = drafter.draft(state, length) if drafter and length else state.no_draft()
            with clock.phase("verify"):
                logits = verify(state, draft)
            with clock.phase("accept"):
                verdict = judge(state, request.stopping, draft, logits, rule)
            with clock.phase("commit"):
                committed = commit(state, draft, verdict, stats)
            yield committed
        if state.past is not None and can_store(state.cache):
            store_past(state.cache, state.past, request.mask)
    finally:
        stats.cache_bytes = state.cache.most_bytes
        stats.seconds = clock.seconds()


def prefill(state: State, request: Request, drafter: Drafter | None) -> None:
    """Fill the cache with each prompt but its last token, which the first round reads.

    Where that can show what the draft is worth, the control is told: see `selfspec.decode.evidence`.

    Rows are stored without their padding: each is moved to the left, and what then stands behind it is scrap. What a
    past holds is not computed again.
    """
    if request.past is not None:
        load_past(request.past, state.cache, request.mask)
    unread = [length - 1 - known for length, known in zip(request.lengths, state.cache.lengths, strict=True)]
    if max(unread) == 0:
        return
    state.cache.reserve(max(request.lengths))
    prompts = torch.zeros_like(request.read[:, : max(unread)])
    columns = request.mask[:, -request.read.shape[1] :]
    for row, count in enumerate(unread):
        prompts[row, :count] = request.read[row, columns[row].nonzero().flatten()[-1 - count : -1]]
    prompts = prompts.to(state.last.device)
    if drafter is not None and not request.embeddings and can_show(state, drafter, unread):
        state.control.learn_prompt(prefill_with_evidence(state, drafter, prompts))
        state.cache.commit(unread)
        return
    start = 0
    for width in state.cache.prefill_widths(unread):
        counts = [min(max(count - start, 0), width) for count in unread]
        state.runner.prefill(prompts[:, start : start + width], counts)
        state.cache.commit(counts)
        start += width


def choose_length(state: State, request: Request) -> int:
    """The most tokens to draft in the round that begins."""
    remaining = max(
        request.stopping.max_new_tokens - len(tokens)
        for tokens, live in zip(state.committed, state.live, strict=True)
        if live
    )
    return state.control.choose(remaining, [state.live[row] for row in state.text.rows])


def verify(state: State, draft: Draft) -> Tensor:
    """One target pass over the last committed token and the draft; logits `[batch, drafted + 1, vocab]`.

    Where the draft's work is exact up to some sublayer, its last token, which no draft step has read, is brought up
    to there too, and the target pass goes on from there with the states of all tokens. Where prompts were given as
    embeddings, the first round reads the last of these, and has no draft.
    """
    if state.opening is not None:
        opening, state.opening = state.opening, None
        return state.runner.logits_of_embeddings(opening)
    target = LayerPath.full(state.runner.depth)
    block = torch.cat([state.last, draft.tokens], 1)
    if draft.resume is None:
        return state.runner.logits(target, block).logits
    state.cache.advance(draft.length)
    tail = state.runner.states(LayerPath.up_to(state.runner.depth, draft.resume.start), block[:, -1:])
    state.cache.rollback(draft.length)
    assert tail is not None
    entering = ExactStates.concatenated([draft.resume.states, tail])
    return state.runner.logits(target.resumed_at(draft.resume.start), block, entering).logits


def commit(state: State, draft: Draft, verdict: Verdict, stats: Stats) -> Round:
    """Make a verdict final: append tokens, move the cursors, count."""
    rows = [RowRound((), (), 0)] * len(state.live)
    doubted: list[int] = []
    outcomes: dict[int, RowOutcome] = {}
    for row, judged in verdict.rows.items():
        count = len(judged.tokens)
        state.committed[row] += judged.tokens
        if not judged.finite:
            (state.failed if judged.ended or not draft.length else doubted).append(row)
        state.live[row] = not judged.ended and row not in state.failed
        # Committed tokens are counted: a place counts by whether the cut lies behind it, not by its verdict. The
        # control learns from what was cut off too, since what comes there is drawn afresh.
        accepted = judged.accepted_of(count)
        stats.count_row(draft.length, judged.judged_of(count), accepted, count, judged.overlap_of(count))
        uncut = count + judged.dropped
        outcomes[row] = RowOutcome(judged.judged_of(uncut), judged.accepted_of(uncut), count, judged.dropped)
        rows[row] = RowRound(tuple(judged.tokens), tuple(judged.drafted), accepted)
    state.control.learn(draft, [outcomes.get(row) for row in state.text.rows])
    stats.rounds += 1
    state.cache.commit([len(rows[row].tokens) for row in state.text.rows])
    state.doubted = doubted
    state.last = verdict.last
    state.leave_out_ended()
    return Round(tuple(rows), draft.steps)
