"""THE loop: prefill, propose, verify, judge, commit. Plain decoding is the same with drafts of no tokens."""

from __future__ import annotations

from collections.abc import Generator

from transformers import Cache

from selfspec.accept import Rule
from selfspec.cache.transfer import can_store, store_past
from selfspec.decode.batch import Batch
from selfspec.decode.judge import judge
from selfspec.decode.output import Round
from selfspec.decode.prefill import prefill
from selfspec.decode.request import Request
from selfspec.decode.stats import PhaseClock, Stats
from selfspec.decode.steps import begin_round, commit, verify
from selfspec.draft import Proposer


def rounds(
    batch: Batch, request: Request, proposer: Proposer | None, rule: Rule, stats: Stats, past: Cache | None
) -> Generator[Round, None, None]:
    """Generate, and yield what each round committed. At the end complete `stats`.

    Args:
        batch: before its first pass.
        request: the prompts.
        proposer: drafts; None: nothing does.
        rule: accepts or rejects draft tokens.
        stats: counts rounds.
        past: receives keys and values of all rows at the end, also where that is between two rounds; None: they are
            dropped.
    """
    clock = PhaseClock(batch.last_tokens.device)
    try:
        with clock.phase("prefill"):
            prefill(batch, request, proposer)
        while batch.unfinished:
            committed = run_round(batch, proposer, rule, stats, clock)
            if past is None:
                batch.drop_finished()
            try:
                yield committed
            except GeneratorExit:
                # Between two rounds all that is committed is there, as it is at the end. At the process's end this
                # module's names are gone.
                if past is not None:
                    _fill(past, batch, request)
                raise
        if past is not None:
            _fill(past, batch, request)
    finally:
        stats.cache_bytes = batch.cache.most_bytes
        stats.substitute_bytes = batch.runner.substitutes.nbytes
        stats.draft_bytes = 0 if proposer is None else proposer.nbytes
        stats.seconds = clock.seconds()


def _fill(past: Cache, batch: Batch, request: Request) -> None:
    """Hand the caller's cache what the rows have read."""
    if can_store(batch.cache):
        store_past(batch.cache, past, request.mask)


def run_round(batch: Batch, proposer: Proposer | None, rule: Rule, stats: Stats, clock: PhaseClock) -> Round:
    """Run one round, and return what it committed.

    Args:
        batch: before the round.
        proposer: drafts; None: nothing does.
        rule: accepts or rejects draft tokens.
        stats: counts the round.
        clock: times its phases.
    """
    with clock.phase("draft"):
        budget = begin_round(batch)
        draft = proposer.propose(batch, budget) if proposer is not None and budget.depth else batch.no_draft()
    with clock.phase("verify"):
        target = verify(batch, draft)
        for each in batch.proposers.values():
            each.ask(draft, target)
    with clock.phase("accept"):  # ends with the one synchronisation of the round
        verdict = judge(batch, draft, target.logits, rule)
    with clock.phase("commit"):
        try:
            # Those whose turn it is not learn, too.
            for each in batch.proposers.values():
                each.learn(batch, draft, target, verdict)
        finally:
            # Processors with memory were shown it, whatever else fails.
            committed = commit(batch, draft, verdict)
        batch.controller.learn(draft, verdict.outcomes())
        stats.count(len(draft.tree), draft.length, verdict)
    return committed
