"""Judge a draft: find the tokens that each row accepts, the token after them, and where the row ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from selfspec.accept.rule import Judging, Rule, declaration_of
from selfspec.accept.tree_paths import tree_tables
from selfspec.cache.tree import Tree
from selfspec.decode.batch import Batch
from selfspec.decode.noise import Purpose
from selfspec.decode.processors import SequentialProcessing, called
from selfspec.device import to_device
from selfspec.draft import Draft
from selfspec.draft.draft import RowVerdict, Verdict
from selfspec.errors import UnsupportedOptionError
from selfspec.kernels.trial import runs_triton


def judge(batch: Batch, draft: Draft, logits: Tensor, rule: Rule) -> Verdict:
    """Judge a round's draft by the target's own logits, `[rows, nodes + 1, vocab]`, and wait for the device."""
    for group in batch.groups:
        # An error at a draft token of the last round may not occur again.
        group.error = None
    # Rows whose processors have memory are judged by group, place by place; all others together, all places at once.
    if not batch.sampling.in_order:
        return _settled(batch, draft, _accepted(batch, draft, logits, rule))
    in_order = [index for index, group in enumerate(batch.groups) if group.sampling.in_order]
    together = [index for index in range(len(batch.groups)) if index not in in_order]
    found: dict[int, RowVerdict] = {}
    last_tokens = batch.last_tokens.clone()
    for groups in [*([together] if together else []), *([index] for index in in_order)]:
        part = batch.part(groups)
        rows = to_device(part.rows, logits.device)
        own, own_logits = draft.of_rows(part.rows), logits[rows]
        if groups is together:
            verdict = _settled(part.batch, own, _accepted(part.batch, own, own_logits, rule))
        else:
            verdict = _judge_group(part.batch, own, own_logits, rule)
        found |= {part.numbers[number]: row for number, row in verdict.rows.items()}
        last_tokens[rows] = verdict.last_tokens
    return Verdict(tuple(batch.running), {number: found[number] for number in sorted(found)}, last_tokens)


@dataclass(frozen=True)
class _Accepted:
    """The accepted part of a draft and the target's own token after it."""

    place: Tensor  # of the deepest accepted node, `[rows]`
    count: Tensor  # accepted draft tokens, `[rows]`; in a chain equal to `place`
    token: Tensor  # from the residual, or the bonus token, `[rows]`; arbitrary where it is not finite
    finite: Tensor  # True if the target's logits there were finite, `[rows]`
    overlap: Tensor
    block: Tensor  # last committed token and draft tokens, `[rows, places]`; of a tree the accepted path alone
    logits: Tensor  # the target's own at these places, `[rows, places, vocab]`
    scores: Tensor  # the logits after processors and warpers

    def along_path(self, tree: Tree) -> _Accepted:
        """Return the same with the accepted path as a chain."""
        tables = tree_tables(tree, self.place.device)
        path = tables.paths[self.place]
        places = path[..., None]
        return replace(
            self,
            count=tables.depths[self.place],
            block=self.block.gather(1, path),
            logits=torch.take_along_dim(self.logits, places, 1),
            scores=torch.take_along_dim(self.scores, places, 1),
        )


def _accepted(batch: Batch, draft: Draft, logits: Tensor, rule: Rule) -> _Accepted:
    """Accept draft tokens at all places at once and draw the token after them, without waiting for the device."""
    scores = _scores(batch, draft, logits)
    if not draft.length:
        return _next(batch, logits, scores)
    p = batch.sampling.probabilities(scores)
    finite = p.sum(-1).isfinite()
    # A draft token may cause logits that are not finite; then processors must not replace them.
    finite &= logits.amax(-1).isfinite()
    seen = effective(batch, draft, p, finite, batch.cache.cursors.positions(p.shape[1]) + 1)
    judged = within(draft, batch.row_lengths(draft))
    if judged is not None:
        seen = replace(seen, draft=ended(seen.draft, judged, seen.p))
    place, token = _accepting(rule, seen)(batch, seen, logits, rule, judged)
    block = torch.cat([batch.last_tokens, draft.tokens], 1)
    finite = finite.gather(1, place[:, None])[:, 0]
    accepted = _Accepted(place, place, token, finite, seen.overlap, block, logits, scores)
    return accepted if draft.tree.is_chain else accepted.along_path(draft.tree)


def _next(batch: Batch, logits: Tensor, scores: Tensor) -> _Accepted:
    """Draw the next token of a round without a draft, in which the rule has nothing to judge."""
    sampling, finite = batch.sampling, batch.sampling.legible(logits)
    if sampling.greedy:
        token = scores.argmax(-1)
    else:
        p = sampling.probabilities(scores)
        finite = finite & p.sum(-1).isfinite()
        decided = sampling.decide(p, batch.cache.cursors.positions(1) + 1, batch.noise)
        token = sampling.draw(decided, batch.noise, Purpose.RECOVER)
    none = torch.zeros_like(token[:, 0])
    overlap = scores.new_empty(len(scores), 0)
    return _Accepted(none, none, token[:, 0], finite[:, 0], overlap, batch.last_tokens, logits, scores)


def _scores(batch: Batch, draft: Draft, logits: Tensor) -> Tensor:
    """Return the logits after processors and warpers, each place with the prefix of its path."""
    sampling, tree = batch.sampling, draft.tree
    if tree.is_chain or not sampling.reads_prefixes:
        return sampling.scores(logits, [draft.tokens])
    scores = torch.empty_like(logits, dtype=torch.float32)
    for node, path in enumerate(tree.paths):
        if not tree.children[node + 1]:
            places = [0, *(each + 1 for each in path)]
            scores[:, places] = sampling.scores(logits[:, places], [draft.tokens[:, list(path)]])
    return scores


def _settled(batch: Batch, draft: Draft, accepted: _Accepted) -> Verdict:
    """Wait for what was accepted, the round's only synchronisation, and find where rows end or are cut."""
    judged = _on_host(batch, draft, accepted)
    limit = lockstep_limit(batch, draft, [row.tokens for row in judged.values()])
    runs = batch.shortened([judged[row].tokens if row in judged else [] for row in range(batch.size)])
    cut = [run[:limit] for run in runs]
    ends = batch.ends(cut, accepted.scores, accepted.logits)
    rows = {
        row: replace(
            found,
            tokens=cut[row][: ends[row]],
            dropped=len(runs[row]) - len(cut[row]) if ends[row] is None else 0,
            ended=ends[row] is not None,
            finite=found.finite or ends[row] is not None,
        )
        for row, found in judged.items()
    }
    # A row without finite logits or a row that was cut has no token of the target's own.
    own = accepted.finite & (accepted.count < limit)
    last = accepted.block.gather(1, accepted.count.clamp(max=limit)[:, None]) if draft.length else accepted.block
    return Verdict(tuple(batch.running), rows, torch.where(own[:, None], accepted.token[:, None], last))


def _on_host(batch: Batch, draft: Draft, accepted: _Accepted) -> dict[int, RowVerdict]:
    """Return the verdict on each unfinished row: the accepted tokens and the target's token after them."""
    paths, nodes = ((), *draft.tree.paths), len(draft.tree)
    columns = torch.stack([accepted.token, accepted.place, accepted.finite], 1)
    if nodes:
        # Transfer everything at once: doubles hold every token id exactly.
        columns = torch.cat([columns.double(), draft.tokens.double(), accepted.overlap.double()], 1)
    judged = {}
    for row, length, numbers in zip(batch.running, batch.row_lengths(draft), columns.tolist(), strict=True):
        if row not in batch.unfinished:
            continue
        token, place, finite, *drafted = (int(number) for number in numbers[: 3 + nodes])
        path = paths[place]
        judged[row] = RowVerdict(
            drafted=drafted,
            path=path,
            judged=len(path) + (len(path) < length and bool(draft.tree.children[place])),
            tokens=[drafted[node] for node in path] + [token] * finite,
            dropped=0,
            ended=False,
            finite=bool(finite),
            overlap=numbers[3 + nodes :],
        )
    return judged


@dataclass(frozen=True)
class Effective:
    """The distributions that a rule judges."""

    draft: Draft  # without probs if its tokens were not drawn
    p: Tensor  # the target's, `[rows, nodes + 1, vocab]`; zeros where not finite, so that draft tokens are rejected
    overlap: Tensor  # 1 - TV(p, q) at each draft token of a coupled chain, `[rows, nodes]`; else `[rows, 0]`


def effective(batch: Batch, draft: Draft, p: Tensor, finite: Tensor, positions: Tensor) -> Effective:
    """Return the distributions that tokens are actually chosen from, at `positions` of the text.

    Where shared noise or greedy decoding decides tokens, the rule judges one-hot distributions: q at the draft's
    tokens, p at the target's choice. A coupled draft's real q is exact too, but rejects tokens on which both agree.
    """
    sampling = batch.sampling
    decided = torch.where(finite[..., None], sampling.decide(p, positions, batch.noise), 0.0)
    overlap = p.new_empty(len(p), 0)
    if sampling.decided and draft.probs is not None and draft.tree.is_chain:
        # The best acceptance rate of any rule.
        overlap = torch.minimum(p[:, : draft.length], draft.probs).sum(-1)
    return Effective(sampling.judged(draft), decided, overlap)


def accept(
    batch: Batch, seen: Effective, logits: Tensor, rule: Rule, judged: Tensor | None = None, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Accept draft tokens by a rule's chances and draw the token after them; return the deepest place, and the token.

    Both are `[rows]`; place 0 means that none is accepted. `judged`, `[rows, nodes]`, marks the nodes to judge; None:
    all. `first` is the number of the first node in the whole draft.
    """
    if len(seen.draft.tree):
        chances = rule.accept_probs(seen.draft, seen.p, logits)
        if batch.sampling.decided and rule.lossless:
            # Nothing is drawn: the chances of a lossless rule are 0 and 1.
            mask = chances > 0.5
        else:
            mask = batch.noise.uniform(Purpose.ACCEPT, first, chances.shape[1]) < chances
        if judged is not None:
            mask &= judged
        place = rule.accepted(mask, seen.draft.tree)
        recovery_probs = rule.recovery_probs(seen.draft, seen.p, place)
    else:
        # Plain decoding: there is nothing to judge, and the token is drawn from p.
        place, recovery_probs = seen.draft.tokens.new_zeros(len(seen.p)), seen.p[:, 0]
    # A row commits one such token per round, so all of them use the noise of one place.
    return place, batch.sampling.draw(recovery_probs[:, None], batch.noise, Purpose.RECOVER)[:, 0]


def _accept_by_triton(
    by: Judging, batch: Batch, seen: Effective, logits: Tensor, rule: Rule, judged: Tensor | None = None, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Do what `accept` does for a rule that kernels know, in one to three launches."""
    from selfspec.kernels.triton_judge import tried_verdict

    draft, uniform, noise = seen.draft, None, None
    if not batch.sampling.decided:
        uniform = batch.noise.uniform(Purpose.ACCEPT, first, draft.length)
        noise = batch.noise.race(seen.p[:, :1], Purpose.RECOVER)[:, 0]

    def stock() -> Tensor:
        return torch.stack(accept(batch, seen, logits, rule, judged, first), 1)

    given, tree = (seen.p, draft.probs, draft.tokens, uniform, judged, noise), None
    if not draft.tree.is_chain:
        tables = tree_tables(draft.tree, seen.p.device)
        tree = tables.children, tables.by_turn
    place, token = tried_verdict(given, by, stock, tree).unbind(1)
    return place, token


def _accepting(rule: Rule, seen: Effective) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function that accepts a draft: `accept`, or the same in few launches."""
    if not runs_triton(seen.p.device) or not len(seen.draft.tree):
        return accept
    declared = declaration_of(type(rule))
    by = None if declared is None else declared.by_kernel
    return accept if by is None else partial(_accept_by_triton, by)


def within(draft: Draft, lengths: Sequence[int]) -> Tensor | None:
    """Return which nodes are judged in each row, `[rows, nodes]`; None: all are.

    Other rows may make a draft longer than a row would have alone. Where tokens are drawn, a row judges only what it
    would alone (`Batch.row_lengths`) and draws the same tokens as alone, since places have the same noise. The length
    depends on committed tokens only, so the output stays exact.
    """
    if min(lengths) == draft.tree.depth:
        return None
    device = draft.tokens.device
    limits = to_device(lengths, device)
    if draft.tree.is_chain:
        return torch.arange(1, draft.length + 1, device=device) <= limits[:, None]
    return tree_tables(draft.tree, device).depths[1:] <= limits[:, None]


def ended(draft: Draft, judged: Tensor, p: Tensor) -> Draft:
    """Return the draft with q of 0 where it is not judged; `p` has the shape of q, if none was drawn."""
    probs = draft.probs
    if probs is None:
        probs = torch.zeros_like(p[:, 1:]).scatter_(-1, draft.tokens[..., None], 1.0)
    # A rule accepts no node with q of 0, nor a later one; the residual max(p - 0, 0) there is p.
    return replace(draft, probs=probs * judged[..., None])


def lockstep_limit(batch: Batch, draft: Draft, runs: Sequence[Sequence[int]]) -> int:
    """Return the most tokens that a row commits in this round: with lockstep, as many as the slowest row.

    `runs` are each unfinished row's accepted tokens and the target's token after them. An empty run, of logits that are
    not finite, holds up other rows only if lockstep is needed.

    Lockstep leaves the output exact. Let T be the number of tokens that the rule lets a row commit, and M the number
    that the other rows allow. Given T > k after k tokens, the next token is distributed as p: over all T it is, and
    given T <= k it is drawn again in the next round. M depends on other drafts and draws, not on that token, so the
    same holds given M > k. Rows share their draft length, which may depend on this row's draft tokens, but M does not:
    under the rules here the chance that k tokens of a draft are accepted does not depend on how it continues. Dropping
    tokens for their values, or for how many their own row accepted, would bias the output.

    tests/accept/test_lossless_rules.py proves this in closed form, tests/decode/test_lockstep.py by samples.
    """
    whole = draft.length + 1
    if not batch.in_lockstep:
        return whole
    return min((len(run) for run in runs if run or batch.needs_lockstep), default=whole)


def _judge_group(batch: Batch, draft: Draft, logits: Tensor, rule: Rule) -> Verdict:
    """Judge one group place by place; if the group is isolated and a processor raises, its rows end."""
    group = batch.groups[0]
    group.ahead = True
    try:
        return judge_in_order(batch, draft, logits, rule)
    except Exception as error:
        if not group.isolated:
            raise
        group.error = error
    rows = {
        row: RowVerdict(drafted, ended=True)
        for row, drafted in zip(batch.running, draft.tokens.tolist(), strict=True)
        if row in batch.unfinished
    }
    return Verdict(tuple(batch.running), rows, batch.last_tokens)


def judge_in_order(batch: Batch, draft: Draft, logits: Tensor, rule: Rule) -> Verdict:
    """Judge one group's draft place by place: processors, rule, then stopping criteria, as in plain decoding.

    A processor with memory sees each committed token once, with all rows at one length, and never a rejected token.
    Each place is judged as a draft of one token, so any lossless rule becomes token-level rejection sampling, exact for
    any q that tokens are drawn from. The round ends where the first row rejects. Waits for the device at each place.
    Raises UnsupportedOptionError for a tree.
    """
    if not draft.tree.is_chain:
        raise UnsupportedOptionError(
            "logits processors and stopping criteria with memory judge chains, and this drafter drafts trees; draft a "
            "chain, or give those that remember nothing an attribute `stateless = True`"
        )
    sampling, sequences = batch.groups[0].sampling, batch.groups[0].sequences
    assert isinstance(sampling.processing, SequentialProcessing)
    sampling.processing.forget_draft()
    drafted = draft.tokens.tolist()
    rows = {
        row: RowVerdict(drafted[index]) for index, row in enumerate(sequences.running) if row in sequences.unfinished
    }
    finite = logits.amax(-1).isfinite().tolist()
    for place in range(draft.length + 1):
        going = {index: row for index, row in enumerate(sequences.running) if row in rows and not rows[row].ended}
        broken = [row for index, row in going.items() if not finite[index][place]]
        if draft.length and broken:
            # A draft token may be the cause, so judge the place again in a round without a draft.
            rows |= {row: replace(rows[row], finite=False) for row in broken}
            break
        whole = torch.zeros(batch.size, logits.shape[-1], device=logits.device)
        whole[batch.running] = logits[:, place].float()
        scores = called(sampling.processing.processors, sequences.followed_by(_runs(batch, rows)), whole)
        scores = scores[batch.running][:, None]
        numbers = _judge_place(batch, draft, logits, scores, rule, place)
        for index, number in going.items():
            token, accepted, is_finite, *overlap = numbers[index].tolist()
            row = rows[number]
            if not is_finite or (number in broken and not sampling.mends):
                rows[number] = replace(row, finite=False, ended=True)
                continue
            path = range(len(row.path) + int(accepted))
            rows[number] = replace(row, tokens=[*row.tokens, int(token)], path=path, overlap=[*row.overlap, *overlap])
        _stop(batch, rows, scores, logits[:, place : place + 1])
        if not all(row.ended or len(row.path) > place for row in rows.values()):
            break
        if all(row.ended for row in rows.values()):
            break
    verdicts = {number: replace(row, judged=min(len(row.path) + 1, len(row.drafted))) for number, row in rows.items()}
    runs, before = _runs(batch, rows), batch.last_tokens.flatten().tolist()
    last = [[[token, *runs[row]][-1]] for row, token in zip(batch.running, before, strict=True)]
    return Verdict(tuple(batch.running), verdicts, torch.tensor(last, device=batch.last_tokens.device))


def _judge_place(batch: Batch, draft: Draft, logits: Tensor, scores: Tensor, rule: Rule, place: int) -> Tensor:
    """Judge a place by its scores, `[rows, 1, vocab]`, and wait for the device; return numbers of each running row.

    These are its token, 1 if that is the draft's, 1 if processors left a token to choose, and the overlap.
    """
    p = batch.sampling.probabilities(scores)
    finite = p.sum(-1).isfinite()
    # The rule sees a draft of one token, or of none at the last place. The token after it is never used.
    token = draft.tokens[:, place : place + 1]
    probs = None if draft.probs is None else draft.probs[:, place : place + 1]
    positions = batch.cache.cursors.positions(place + 1)[:, place:] + 1
    seen = effective(batch, Draft.chain(token, probs), p, finite, positions)
    places = token.shape[1] + 1
    seen = replace(seen, p=seen.p.expand(-1, places, -1))
    accepted, own = _accepting(rule, seen)(batch, seen, logits[:, place : place + places], rule, first=place)
    chosen = torch.where(accepted > 0, token[:, 0], own) if token.shape[1] else own
    # Transfer everything at once: doubles hold every token id exactly.
    columns = torch.stack([chosen, accepted, finite[:, 0]], 1)
    return torch.cat([columns.double(), seen.overlap.double()], 1).cpu()


def _stop(batch: Batch, rows: dict[int, RowVerdict], scores: Tensor, logits: Tensor) -> None:
    """Record the scores of the place just judged, and end the rows that end there."""
    grown = [number for number, row in rows.items() if not row.ended]
    starts = [len(tokens) for tokens in batch.committed]
    for number, row in rows.items():
        starts[number] += len(row.tokens) - (number in grown)
    group = batch.groups[0]
    kept = group.records.keep(
        scores, logits, batch.running, starts, [int(number in grown) for number in range(len(starts))]
    )
    ended = {number for number in grown if group.stopping.ends(starts[number] + 1, rows[number].tokens[-1])}
    if group.stopping.criteria and grown:
        verdicts = group.stopping.criteria(group.sequences.followed_by(_runs(batch, rows)), kept).tolist()
        count = max(starts[number] for number in grown) + 1
        ended.update(group.stopping.ended(group.sequences, [each for each in grown if verdicts[each]], count))
    rows |= {number: replace(rows[number], ended=True) for number in ended}


def _runs(batch: Batch, rows: dict[int, RowVerdict]) -> list[list[int]]:
    return [list(rows[number].tokens) if number in rows else [] for number in range(batch.size)]
