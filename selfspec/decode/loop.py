"""The loop: prefill, propose, verify, judge, commit. Plain decoding is the same loop with drafts of no tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from selfspec.accept import Rule
from selfspec.cache.transfer import load_past, store_past
from selfspec.decode.batch import Batch
from selfspec.decode.judge import judge
from selfspec.decode.output import Round, RowRound, Stats
from selfspec.decode.request import Request
from selfspec.device import backend, has_streams
from selfspec.draft import Draft, Proposer, Verdict
from selfspec.draft.draft import Budget
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import LayerPath
from selfspec.runtime.request import PassRequest, PassResult


def begin_round(batch: Batch) -> Budget:
    """Give a round fresh noise and room in the cache, and return the budget of its draft."""
    batch.noise.begin_round()
    batch.cache.cursors.reserve(batch.longest)
    # Erase what draft tokens left in the cache of rows that are tried again.
    batch.cache.scrub([index for index, row in enumerate(batch.running) if row in batch.nonfinite_rows])
    source = batch.cache.source
    unread = source is not None and not source.cross.layers
    # A prompt's last embedding is read, and keys and values of a source are made, by a pass of the whole network.
    if batch.nonfinite_rows or batch.first_embeddings is not None or unread:
        return Budget.chain(0)
    wanted = max(map(batch.remaining, batch.unfinished))
    return batch.controller.budget(wanted, [row in batch.unfinished for row in batch.running])


def verify(batch: Batch, draft: Draft) -> PassResult:
    """Run the target over the last committed token and the draft; its logits are `[rows, drafted + 1, vocab]`."""
    runner, taps = batch.runner, batch.taps
    target = LayerPath.full(runner.depth)
    if batch.first_logits is not None:
        logits, batch.first_logits = batch.first_logits, None
        return PassResult(logits)
    if batch.first_embeddings is not None:
        embeddings, batch.first_embeddings = batch.first_embeddings, None
        return runner.run(PassRequest(target, embeddings))
    block = torch.cat([batch.last_tokens, draft.tokens], 1)
    request = PassRequest(target, block, tree=draft.tree, taps=taps)
    # A pass that resumes has no states of earlier layers.
    if draft.resume is None or taps:
        return runner.run(request)
    # Bring the draft's last tokens, which no draft step has read, up to where the target resumes.
    start, read = draft.resume.start, draft.resume.read
    path = LayerPath.up_to(runner.depth, start)
    tail = runner.run(replace(request, path=path, tokens=block[:, read:], first=read - 1, headless=True)).states
    assert tail is not None
    entering = ExactStates.concatenated([draft.resume.states, tail])
    return runner.run(replace(request, path=target.resumed_at(start), entering=entering))


def commit(batch: Batch, draft: Draft, verdict: Verdict) -> Round:
    """Make a verdict final, and return the tokens that each row of the batch committed."""
    for group in batch.groups:
        group.ahead = False
    rows = [RowRound((), (), 0)] * batch.size
    for number, row in verdict.rows.items():
        batch.committed[number] += row.tokens
        accepted = row.accepted_of(len(row.tokens))
        rejected = draft.tree.first_branch(row.path[:accepted])
        rows[number] = RowRound(
            tuple(row.tokens), tuple(row.drafted), accepted, tuple(row.drafted[node] for node in rejected)
        )
        if row.ended:
            batch.end(number)
    counts = [len(rows[row].tokens) for row in batch.running]
    if draft.tree.is_chain:
        batch.cache.commit(counts)
    else:
        paths = [verdict.rows[row].path if row in verdict.rows else () for row in batch.running]
        batch.cache.commit_paths([(-1, *path)[:count] for path, count in zip(paths, counts, strict=True)])
    batch.last_tokens = verdict.last_tokens
    _settle_nonfinite_rows(batch, draft, verdict)
    return Round(tuple(rows), draft.steps)


def _settle_nonfinite_rows(batch: Batch, draft: Draft, verdict: Verdict) -> None:
    """Mark rows whose logits are not finite for a round without a draft; end those that just had one."""
    # The cause may be a draft token that plain decoding never reads; its NaN spoils other places of the block too, as
    # NaN times an attention weight of 0 is NaN. So a row commits the tokens before the first such place, drawn from
    # finite distributions. Its next round reads nothing that the draft left: if that fails, plain decoding fails too.
    batch.nonfinite_rows = []
    for number, row in verdict.rows.items():
        if row.finite:
            continue
        if draft.length and not row.ended:
            batch.nonfinite_rows.append(number)
        else:
            batch.fail(number)


def rounds(
    batch: Batch, request: Request, proposer: Proposer | None, rule: Rule, stats: Stats, past: Cache | None
) -> Generator[Round, None, None]:
    """Generate and yield each round; complete `stats` and fill `past`, if given, even if the caller stops early."""
    clock = PhaseClock(batch.last_tokens.device)
    # Pieces of one text share a prediction. Held here: at the end of the process this module's names are gone.
    count = partial(_predicted, request)
    before = count()
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
                # Between two rounds the cache is as complete as at the end.
                if past is not None:
                    _fill(past, batch, request)
                raise
        if past is not None:
            _fill(past, batch, request)
    finally:
        accepted, rejected = (now - then for now, then in zip(count(), before, strict=True))
        stats.predicted, stats.predicted_accepted = accepted + rejected, accepted
        stats.cache_bytes = batch.cache.most_bytes
        stats.substitute_bytes = batch.runner.substitutes.nbytes
        stats.draft_bytes = 0 if proposer is None else proposer.nbytes
        stats.seconds = clock.seconds()
        batch.runner.end()
        if proposer is not None:
            proposer.end()


def _predicted(request: Request) -> tuple[int, int]:
    """Count the accepted and rejected draft tokens out of predictions."""
    predictions = [each for each in request.predictions if each is not None]
    return sum(each.accepted for each in predictions), sum(each.rejected for each in predictions)


def _fill(past: Cache, batch: Batch, request: Request) -> None:
    """Fill the caller's cache with the keys and values that the rows have read."""
    # States have no columns, so one cache holds rows with states only if they are equally long.
    if batch.cache.rolls_back_by_cursor or batch.cache.cursors.uniform:
        store_past(batch.cache, past, request.mask)


def run_round(batch: Batch, proposer: Proposer | None, rule: Rule, stats: Stats, clock: PhaseClock) -> Round:
    """Run one round, without a draft if there is no proposer, and return the tokens that it committed."""
    with clock.phase("draft"):
        budget = begin_round(batch)
        draft = proposer.propose(batch, budget) if proposer is not None and budget.depth else batch.no_draft()
    with clock.phase("verify"):
        target = verify(batch, draft)
        for each in batch.proposers.values():
            each.ask(draft, target)
    with clock.phase("accept"):  # ends with the only synchronisation of the round
        verdict = judge(batch, draft, target.logits, rule)
    with clock.phase("commit"):
        try:
            # Proposers that did not draft this round learn, too.
            for each in batch.proposers.values():
                each.learn(batch, draft, target, verdict)
            for row, found in verdict.rows.items():
                if (prediction := batch.prediction(row)) is not None:
                    prediction.learn(found)
        finally:
            # Processors with memory have seen the tokens, so commit even if learning fails.
            committed = commit(batch, draft, verdict)
        batch.controller.learn(draft, [verdict.rows.get(row) for row in verdict.running])
        stats.count(len(draft.tree), draft.length, verdict)
    return committed


def prefill(batch: Batch, request: Request, proposer: Proposer | None) -> None:
    """Fill the cache with each prompt except its last token, without padding and tokens that a past holds.

    Without a draft the last token is read, too, and its logits wait for the first round, which then has no pass.
    """
    if request.past is not None and not request.anew:
        load_past(request.past, batch.cache, request.mask)
    unread = [length - 1 - known for length, known in zip(request.lengths, batch.cache.seq_lens, strict=True)]
    if max(unread) == 0:
        return
    batch.cache.cursors.reserve(max(request.lengths))
    # Move rows to the left; slots after them are never read.
    prompts = torch.zeros_like(request.read[:, : max(unread)])
    columns = request.mask[:, -request.read.shape[1] :]
    for row, count in enumerate(unread):
        prompts[row, :count] = request.read[row, columns[row].nonzero().flatten()[-1 - count : -1]]
    cache, runner = batch.cache, batch.runner
    # One pass of the stock model may read prompts of one length to their ends.
    length, widest = unread[0], math.inf if batch.prefill_width is None else batch.prefill_width
    at_once = not request.embeddings and cache.rolls_back_by_cursor and set(unread) == {length} and length < widest
    if at_once and proposer is None and cache.source is None and cache.empty and runner.keeps_last_logits:
        batch.first_logits = runner.last_logits(torch.cat([prompts.to(batch.last_tokens), batch.last_tokens], 1))
        cache.commit(unread)
        return
    reading = Prefill(batch, prompts, unread)
    while reading.left:
        reading.read(batch.prefill_width)


class Prefill:
    """Reads prompts into a batch's cache, piece by piece: ids or embeddings, `[batch, tokens]` or `[..., hidden]`.

    `counts` are the tokens of each row, from the left; with `at_once`, one pass reads all columns.
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
        """Read up to `most` tokens more of each row (None: any number); return how many were read."""
        if not self.left:
            return 0
        batch, start = self.batch, self._read
        width = self.tokens.shape[1]
        if not self._at_once:
            width = batch.cache.prefill_width([max(count - start, 0) for count in self._counts], most)
        counts = [min(max(count - start, 0), width) for count in self._counts]
        features = batch.runner.prefill(self.tokens[:, start : start + width], counts, batch.taps)
        for proposer in batch.proposers.values():
            proposer.read_prompt(batch, counts, features)
        batch.cache.commit(counts)
        self._read += max(counts)
        return max(counts)


class PhaseClock:
    """Sums wall time by phase; on devices with streams by events that are read at the end, so no phase waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_streams = has_streams(device)
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block towards `name`."""
        if self._has_streams:
            begin, end = (backend(self._device).Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            return
        started = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase so far. Waits for the device."""
        for name, begin, end in self._events:
            end.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1000
        self._events.clear()
        return dict(self._seconds)
