"""THE loop: prefill, draft, verify, accept, commit. Plain decoding is its draft-length-0 case."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.accept import Rule
from selfspec.control import RowOutcome
from selfspec.draft import Draft, Drafter
from selfspec.gate import ExactStates
from selfspec.output import Round, RowRound
from selfspec.past import can_store, load_past, store_past
from selfspec.path import Path
from selfspec.request import Request
from selfspec.state import State
from selfspec.stats import PhaseClock, Stats
from selfspec.text import Prefixes


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
    try:
        with clock.phase("prefill"):
            prefill(state, request)
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
                accepted = accept(state, draft, logits, rule)
            with clock.phase("commit"):
                committed = commit(state, request, draft, accepted, stats)
            yield committed
        if state.past is not None and can_store(state.cache):
            store_past(state.cache, state.past, request.mask)
    finally:
        stats.cache_bytes = state.cache.most_bytes
        stats.seconds = clock.seconds()


def prefill(state: State, request: Request) -> None:
    """Fill the cache with each prompt but its last token, which the first round reads.

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
    start = 0
    for width in state.cache.prefill_widths(unread):
        counts = [min(max(count - start, 0), width) for count in unread]
        state.passes.prefill(prompts[:, start : start + width], counts)
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
        return state.passes.logits_of_embeddings(opening)
    target = Path.full(state.passes.depth)
    block = torch.cat([state.last, draft.tokens], 1)
    if draft.resume is None:
        return state.passes.logits(target, block).logits
    state.cache.advance(draft.length)
    tail = state.passes.states(Path.up_to(state.passes.depth, draft.resume.start), block[:, -1:])
    state.cache.rollback(draft.length)
    assert tail is not None
    entering = ExactStates.concatenated([draft.resume.states, tail])
    return state.passes.logits(target.resumed_at(draft.resume.start), block, entering).logits


@dataclass(frozen=True)
class Accepted:
    """What stands of a draft, and the target's own token after it.

    Attributes:
        count: draft tokens that stand, `[batch]`.
        token: the token after them, from the residual or as the bonus token, `[batch]`.
        finite: whether the target's logits there were finite; where not, `token` means nothing, `[batch]`.
        logits: the target's own, `[batch, drafted + 1, vocab]`.
        scores: the same as processors and warpers leave them.
        overlap: sum of min(p, q) = 1 - TV at each draft token, the best chance any rule has to accept it, for a
            coupled draft; else zeros, `[batch, drafted]`.
    """

    count: Tensor
    token: Tensor
    finite: Tensor
    overlap: Tensor
    logits: Tensor
    scores: Tensor


def accept(state: State, draft: Draft, logits: Tensor, rule: Rule) -> Accepted:
    """Judge the draft and draw the token after it. Nothing waits for the device here."""
    sampling = state.sampling
    scores = sampling.scores(logits, Prefixes(state.text, [draft.tokens]))
    p = sampling.probabilities(scores)
    finite = logits.amax(-1).isfinite() & p.sum(-1).isfinite()
    # A p of zeros rejects whatever was drafted there: the row ends at the last token that has a finite p.
    decided = torch.where(finite[..., None], sampling.decide(p, state.cache.positions(p.shape[1]) + 1), 0.0)
    q = None if sampling.decided else draft.q
    coins = (len(state.live), draft.length)
    noise = torch.rand(coins, generator=state.generator, dtype=p.dtype, device=p.device)
    noise = sampling.left(noise)
    count = rule.accepted(noise < rule.heads(draft.tokens, q, decided, logits))
    token = sampling.draw(rule.next(draft.tokens, q, decided, count), state.generator)
    overlap = torch.zeros_like(noise)
    if draft.q is not None and sampling.decided:
        overlap = torch.minimum(p[:, :-1], draft.q).sum(-1)
    return Accepted(count, token, finite.gather(1, count[:, None])[:, 0], overlap, logits, scores)


def commit(state: State, request: Request, draft: Draft, accepted: Accepted, stats: Stats) -> Round:
    """Make tokens final: cut each row at its end, move the cursors, count. The round's one synchronisation."""
    verdicts = torch.stack([accepted.token, accepted.count, accepted.finite], 1)
    # As doubles, which hold every token id exactly, all of it comes over at once.
    table = torch.cat([verdicts.double(), draft.tokens.double(), accepted.overlap.double()], 1).tolist()
    judgements = {
        row: _Judgement.read(numbers, draft.length)
        for row, numbers in zip(state.text.rows, table, strict=True)
        if state.live[row]
    }
    most = most_committed(state, draft, [judged.run for judged in judgements.values()])
    stood = [judgements[row].run if row in judgements else [] for row in range(len(state.live))]
    stood = request.stopping.shortened(state.text, stood)
    runs = [run[:most] for run in stood]
    ends = request.stopping.judged(state.text, runs, state.record(accepted.scores, accepted.logits, runs))
    rows = [RowRound((), (), 0)] * len(runs)
    doubted: list[int] = []
    outcomes: dict[int, RowOutcome] = {}
    for row, judged in judgements.items():
        end = ends[row]
        kept = runs[row][:end]
        state.committed[row] += kept
        if end is None and not judged.finite:
            (doubted if draft.length else state.failed).append(row)
        state.live[row] = end is None and row not in state.failed
        # Counted is what was committed, so that a place counts by whether the cut lies behind it, not by the verdict on
        # it. The control is told of the verdict on what was cut off too: what comes there is drawn afresh.
        seen, stands = judged.of_draft(len(kept))
        stats.count_row(draft.length, seen, stands, len(kept), sum(judged.overlap[:seen]))
        told = len(kept) if end is not None else len(stood[row])
        outcomes[row] = RowOutcome(*judged.of_draft(told), len(kept), told - len(kept))
        rows[row] = RowRound(tuple(kept), tuple(judged.drafted), stands)
    state.control.learn(draft, [outcomes.get(row) for row in state.text.rows])
    stats.rounds += 1
    state.cache.commit([len(rows[row].tokens) for row in state.text.rows])
    state.doubted = doubted
    # A row in doubt has no token of the target's own after what stands, nor has a row that was cut.
    own = accepted.finite & (accepted.count < most)
    standing = torch.cat([state.last, draft.tokens], 1).gather(1, accepted.count.clamp(max=most)[:, None])
    state.last = torch.where(own[:, None], accepted.token[:, None], standing)
    state.leave_out_ended()
    return Round(tuple(rows), draft.steps)


def most_committed(state: State, draft: Draft, runs: Iterable[list[int]]) -> int:
    """The most tokens that a row commits of this round: the shortest run's, where rows are to be kept in step.

    A pass over rows at different places needs a mask and scattered writes. So where rows stand alike, and the control
    wants them to, what stands in some rows beyond the others is dropped.

    That leaves the output exact. Let T be the number of tokens that stand in a row, and M what the other rows allow it.
    After k tokens and given T > k, the next one is distributed as p: over all T it is, and given T <= k it is drawn
    afresh. M comes of other drafts and other coins, so it says nothing about that token: given T > k and M > k it is
    distributed as p too, and else drawn afresh. Rows share the length of their drafts, which may hang on the tokens of
    this row as well; but with the rules here the chance that k tokens of a draft stand does not depend on how it goes
    on, so what the other rows allow does not either. To drop tokens for what they are, or for what stands in their own
    row, would bias the output.

    Args:
        state: before the round is committed.
        draft: of the round.
        runs: of each live row, the tokens that stand and the target's own after them. One in doubt may have none, which
            must not stall the others.
    """
    places = {place for row, place in zip(state.text.rows, state.cache.lengths, strict=True) if state.live[row]}
    whole = draft.length + 1
    if len(places) > 1 or not state.control.keeps_step():
        return whole
    return min((len(run) for run in runs if run), default=whole)


@dataclass(frozen=True)
class _Judgement:
    """One row of `Accepted` and its draft, on the host."""

    token: int
    count: int
    finite: bool
    drafted: list[int]
    overlap: list[float]

    @classmethod
    def read(cls, numbers: list[float], drafted: int) -> _Judgement:
        """Of a row of token, count, finite, draft tokens and overlaps."""
        token, count, finite, *tokens = (int(number) for number in numbers[: 3 + drafted])
        return cls(token, count, bool(finite), tokens, numbers[3 + drafted :])

    @property
    def run(self) -> list[int]:
        """The tokens that stand, and the target's own after them."""
        return self.drafted[: self.count] + [self.token] * self.finite

    def of_draft(self, tokens: int) -> tuple[int, int]:
        """How many draft tokens were judged, and how many accepted, where so many tokens of the run are committed.

        The target judged one more than it accepted, unless it had accepted all or the run ends before.
        """
        accepted = min(self.count, tokens)
        return min(accepted + 1, len(self.drafted)) if tokens > accepted else accepted, accepted
