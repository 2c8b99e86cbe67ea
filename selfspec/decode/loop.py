"""THE loop: prefill, propose, verify, judge, commit. Plain decoding is the same with drafts of no tokens."""

from __future__ import annotations

from collections.abc import Callable, Generator

from torch import Tensor

from selfspec.accept import Rule
from selfspec.decode.batch import Batch
from selfspec.decode.judge import judge_together
from selfspec.decode.judge_in_order import judge_in_order
from selfspec.decode.output import Round
from selfspec.decode.prefill import prefill
from selfspec.decode.request import Request
from selfspec.decode.stats import PhaseClock, Stats
from selfspec.decode.steps import commit, propose, verify
from selfspec.draft import Draft, Proposer, Verdict

Judge = Callable[[Batch, Draft, Tensor, Rule], Verdict]
"""Judges a draft by the target's logits: `judge_together` and its like."""


def rounds(
    batch: Batch, request: Request, proposer: Proposer | None, rule: Rule, stats: Stats, clock: PhaseClock
) -> Generator[Round, None, None]:
    """Generate, and yield what each round committed; `stats` counts the rounds, and `clock` times their phases."""
    judge = judge_in_order if batch.sampling.in_order else judge_together
    with clock.phase("prefill"):
        prefill(batch, request, proposer)
    while batch.unfinished:
        yield run_round(batch, proposer, rule, judge, stats, clock)


def run_round(
    batch: Batch, proposer: Proposer | None, rule: Rule, judge: Judge, stats: Stats, clock: PhaseClock
) -> Round:
    """Run one round, and return what it committed. Arguments as in `rounds`; `judge` makes the verdict."""
    with clock.phase("draft"):
        draft = propose(batch, proposer)
    with clock.phase("verify"):
        logits = verify(batch, draft)
    with clock.phase("accept"):  # ends with the one synchronisation of the round
        verdict = judge(batch, draft, logits, rule)
    with clock.phase("commit"):
        if proposer is not None:
            proposer.learn(batch, draft, logits, verdict)
        committed = commit(batch, draft, verdict)
        batch.controller.learn(draft, verdict.outcomes())
        stats.count(len(draft.tree), draft.length, verdict)
    return committed
