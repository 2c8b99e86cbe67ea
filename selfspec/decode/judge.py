"""Judge a draft: find the tokens that each row accepts, the token after them, and where the row ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from selfspec.accept import Rule
from selfspec.accept.tree_paths import TreeTables, tree_tables
from selfspec.cache.tree import Tree
from selfspec.decode.batch import Batch
from selfspec.decode.group import AlikeSampling, BatchSampling, JudgedScores, chosen
from selfspec.decode.noise import Purpose
from selfspec.decode.processors import SequentialProcessing, called
from selfspec.device import to_device
from selfspec.draft import Draft
from selfspec.draft.draft import RowVerdict, Verdict
from selfspec.errors import UnsupportedOptionError


def judge(batch: Batch, draft: Draft, logits: Tensor, rule: Rule) -> Verdict:
    """Judge a round's draft by the target's own logits, `[rows, nodes + 1, vocab]`, and wait for the device."""
    for group in batch.groups:
        # An error at a draft token of the last round may not occur again.
        group.error = None
    # Rows whose processors have memory are judged by group, place by place; all others together, all places at once.
    if not batch.sampling.in_order:
        asked, kept = _Asked.of(batch, rule, draft.length and len(draft.tree)), None
        columns = _repeated(batch, draft, logits, rule, asked) if batch.runner.captures else None
        if columns is None:
            judged = _judged(asked, rule, draft, logits)
            columns = judged.columns(batch.last_tokens, draft)
            if batch.keeps_scores:
                path = tree_tables(draft.tree, logits.device).paths[judged.place][..., None]
                kept = JudgedScores(*(torch.take_along_dim(each, path, 1) for each in (judged.scores, logits)))
        return _settled(batch, draft, columns, kept)
    in_order = [index for index, group in enumerate(batch.groups) if group.sampling.in_order]
    together = [index for index in range(len(batch.groups)) if index not in in_order]
    found: dict[int, RowVerdict] = {}
    last_tokens = batch.last_tokens.clone()
    for groups in [*([together] if together else []), *([index] for index in in_order)]:
        part = batch.part(groups)
        rows = to_device(part.rows, logits.device)
        own, own_logits = draft.of_rows(part.rows), logits[rows]
        verdict = (judge if groups is together else _judge_group)(part.batch, own, own_logits, rule)
        found |= {part.numbers[number]: row for number, row in verdict.rows.items()}
        last_tokens[rows] = verdict.last_tokens
    return Verdict(tuple(batch.running), {number: found[number] for number in sorted(found)}, last_tokens)


@dataclass(frozen=True)
class _Asked:
    """Holds what a judgement takes besides the draft and the target's logits."""

    sampling: BatchSampling | AlikeSampling
    decide: Callable[[Tensor], Tensor]  # `BatchSampling.decide` of p
    accept: Tensor | None  # uniform numbers, `[rows, nodes]`; None: all chances are 0 and 1
    recover: tuple[Tensor, ...]  # numbers that draw the token after the accepted nodes, see `group.chosen`

    @classmethod
    def of(cls, batch: Batch, rule: Rule, nodes: int, first: int = 0) -> _Asked:
        """Take what judges some nodes, of which the first has the number `first` in the whole draft."""
        sampling, cursors, noise = batch.sampling, batch.cache.cursors, batch.noise

        def decide(p: Tensor) -> Tensor:
            return sampling.decide(p, cursors.positions(p.shape[1], first - 1) + 1, noise)

        # A lossless rule draws nothing where each place has one possible token.
        draws = nodes and not (sampling.decided and rule.lossless)
        accept = noise.uniform(Purpose.ACCEPT, first, nodes) if draws else None
        # A row commits one such token per round, so all of them use the noise of one place.
        return cls(sampling, decide, accept, sampling.lots(noise, Purpose.RECOVER, 0, 1, batch.runner.vocabulary))


@dataclass(frozen=True)
class _Judgement:
    """Judges drafts that are alike, of rows that choose tokens alike: a function of tensors alone; see `_repeated`."""

    sampling: AlikeSampling
    rule: Rule
    tree: Tree
    has: tuple[bool, ...]  # which of the draft's probs and `_Asked.accept` are given
    held: list[TreeTables] = field(default_factory=list, compare=False)

    def __call__(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, last, tokens, *rest = tensors
        # Captures know these tables by their address, and others may take their place in the cache.
        tables = tree_tables(self.tree, logits.device)
        if all(each is not tables for each in self.held):
            self.held.append(tables)
        given = iter(rest)
        probs, accept = (next(given) if each else None for each in self.has)
        draft = Draft(tokens, self.tree, probs)
        asked = _Asked(self.sampling, lambda p: p, accept, tuple(given))
        return (_judged(asked, self.rule, draft, logits).columns(last, draft),)


@dataclass(frozen=True)
class _Judged:
    """Holds the accepted place of each row, the token after it, and the scores they come from."""

    place: Tensor  # of the deepest accepted node, `[rows]`
    token: Tensor  # from the residual, or the bonus token, `[rows]`; arbitrary where it is not finite
    finite: Tensor  # True if the target's logits there were finite, `[rows]`
    scores: Tensor  # the logits after processors and warpers, `[rows, nodes + 1, vocab]`

    def columns(self, last: Tensor, draft: Draft) -> Tensor:
        """Return all that the host asks for: doubles hold every token id exactly."""
        own = torch.stack([self.token, self.place, self.finite, last[:, 0]], 1)
        return torch.cat([own.double(), draft.tokens.double()], 1) if len(draft.tree) else own


def _repeated(batch: Batch, draft: Draft, logits: Tensor, rule: Rule, asked: _Asked) -> Tensor | None:
    """Judge by a function that may be captured, to `_Judged.columns`; None: rows choose differently, or keep scores."""
    alike = batch.sampling.alike()
    # A rule of another package may act differently each time.
    if alike is None or batch.keeps_scores or not type(rule).__module__.startswith("selfspec."):
        return None
    some = (draft.probs, asked.accept)
    same = _Judgement(alike, rule, draft.tree, tuple(each is not None for each in some))
    given = (logits, batch.last_tokens, draft.tokens, *(each for each in some if each is not None), *asked.recover)
    (columns,) = batch.runner.repeat(same, given)
    return columns


def _judged(asked: _Asked, rule: Rule, draft: Draft, logits: Tensor) -> _Judged:
    """Accept draft tokens at all places at once and draw the token after them, without waiting for the device."""
    sampling = asked.sampling
    scores = _scores(sampling, draft, logits)
    if not draft.length:
        return _next(asked, logits, scores)
    p = sampling.probabilities(scores)
    finite = p.sum(-1).isfinite()
    # A draft token may cause logits that are not finite; then processors must not replace them.
    finite &= logits.amax(-1).isfinite()
    # Where shared noise or greedy decoding decides tokens, the rule judges one-hot distributions: q at the draft's
    # tokens, p at the target's choice. A coupled draft's real q is exact too, but rejects tokens on which both agree.
    decided = torch.where(finite[..., None], asked.decide(p), 0.0)
    place, token = accept(sampling.judged(draft), decided, logits, rule, asked)
    return _Judged(place, token, finite.gather(1, place[:, None])[:, 0], scores)


def _next(asked: _Asked, logits: Tensor, scores: Tensor) -> _Judged:
    """Draw the next token of a round without a draft, in which the rule has nothing to judge."""
    sampling = asked.sampling
    finite = sampling.legible(logits)
    if sampling.greedy:
        token = scores.argmax(-1)
    else:
        p = sampling.probabilities(scores)
        finite = finite & p.sum(-1).isfinite()
        token = chosen(asked.decide(p), asked.recover)
    none = torch.zeros_like(token[:, 0])
    return _Judged(none, token[:, 0], finite[:, 0], scores)


def _scores(sampling: BatchSampling | AlikeSampling, draft: Draft, logits: Tensor) -> Tensor:
    """Return the logits after processors and warpers, each place with the prefix of its path."""
    tree = draft.tree
    if tree.is_chain or isinstance(sampling, AlikeSampling) or not sampling.reads_prefixes:
        return sampling.scores(logits, [draft.tokens])
    scores = torch.empty_like(logits, dtype=torch.float32)
    for node, path in enumerate(tree.paths):
        if not tree.children[node + 1]:
            places = [0, *(each + 1 for each in path)]
            scores[:, places] = sampling.scores(logits[:, places], [draft.tokens[:, list(path)]])
    return scores


def _settled(batch: Batch, draft: Draft, judged_columns: Tensor, kept: JudgedScores | None) -> Verdict:
    """Wait for what was accepted, the round's only synchronisation, and find where rows end or are cut."""
    columns = judged_columns.tolist()
    judged = _on_host(batch, draft, columns)
    limit = lockstep_limit(batch, draft, [row.tokens for row in judged.values()])
    runs = batch.shortened([judged[row].tokens if row in judged else [] for row in range(batch.size)])
    cut = [run[:limit] for run in runs]
    ends = batch.ends(cut, kept)
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
    # A row that committed nothing goes on from the token before. To make these here takes one copy, and no launches.
    each = zip(batch.running, columns, strict=True)
    last = [(cut[row] or [int(before)])[-1] for row, (_, _, _, before, *_) in each]
    return Verdict(tuple(batch.running), rows, to_device(last, batch.last_tokens.device)[:, None])


def _on_host(batch: Batch, draft: Draft, columns: list[list[float]]) -> dict[int, RowVerdict]:
    """Return the verdict on each unfinished row: the accepted tokens and the target's token after them."""
    paths, nodes = ((), *draft.tree.paths), len(draft.tree)
    judged = {}
    for row, numbers in zip(batch.running, columns, strict=True):
        if row not in batch.unfinished:
            continue
        token, place, finite, _, *drafted = (int(number) for number in numbers[: 4 + nodes])
        path = paths[place]
        judged[row] = RowVerdict(
            drafted=drafted,
            path=path,
            judged=len(path) + bool(draft.tree.children[place]),
            tokens=[drafted[node] for node in path] + [token] * finite,
            dropped=0,
            ended=False,
            finite=bool(finite),
        )
    return judged


def accept(draft: Draft, p: Tensor, logits: Tensor, rule: Rule, asked: _Asked) -> tuple[Tensor, Tensor]:
    """Accept draft tokens by a rule's chances and draw the token after them; return the deepest place, and the token.

    Both are `[rows]`; place 0 means that none is accepted. Draft and p, `[rows, nodes + 1, vocab]`, are what tokens are
    chosen from: the draft without probs if its tokens were not drawn, p of zeros where it is not finite, so that draft
    tokens are rejected there.
    """
    if len(draft.tree):
        chances = rule.accept_probs(draft, p, logits)
        mask = chances > 0.5 if asked.accept is None else asked.accept < chances
        place = rule.accepted(mask, draft.tree)
        recovery_probs = rule.recovery_probs(draft, p, place)
    else:
        # Plain decoding: there is nothing to judge, and the token is drawn from p.
        place, recovery_probs = draft.tokens.new_zeros(len(p)), p[:, 0]
    return place, chosen(recovery_probs[:, None], asked.recover)[:, 0]


def lockstep_limit(batch: Batch, draft: Draft, runs: Sequence[Sequence[int]]) -> int:
    """Return the most tokens that a row commits in this round: with lockstep, as many as the slowest row.

    `runs` are each unfinished row's accepted tokens and the target's token after them. An empty run, of logits that are
    not finite, holds up other rows only if lockstep is needed.

    Lockstep leaves the output exact, as docs/exactness.md proves, tests/accept/test_lossless_rules.py in closed form,
    and tests/decode/test_lockstep.py by samples. Dropping tokens for their values, or for how many their own row
    accepted, would bias the output.
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
            token, accepted, is_finite = numbers[index].tolist()
            row = rows[number]
            if not is_finite or (number in broken and not sampling.mends):
                rows[number] = replace(row, finite=False, ended=True)
                continue
            path = range(len(row.path) + int(accepted))
            rows[number] = replace(row, tokens=[*row.tokens, int(token)], path=path)
        _stop(batch, rows, scores, logits[:, place : place + 1])
        if not all(row.ended or len(row.path) > place for row in rows.values()):
            break
        if all(row.ended for row in rows.values()):
            break
    verdicts = {number: replace(row, judged=min(len(row.path) + 1, len(row.drafted))) for number, row in rows.items()}
    runs, before = _runs(batch, rows), batch.last_tokens.flatten().tolist()
    last = [[[token, *runs[row]][-1]] for row, token in zip(batch.running, before, strict=True)]
    return Verdict(tuple(batch.running), verdicts, to_device(last, batch.last_tokens.device))


def _judge_place(batch: Batch, draft: Draft, logits: Tensor, scores: Tensor, rule: Rule, place: int) -> Tensor:
    """Judge a place by its scores, `[rows, 1, vocab]`, and wait for the device; return numbers of each running row.

    These are its token, 1 if that is the draft's, and 1 if processors left a token to choose.
    """
    p = batch.sampling.probabilities(scores)
    finite = p.sum(-1).isfinite()
    # The rule sees a draft of one token, or of none at the last place. The token after it is never used.
    token = draft.tokens[:, place : place + 1]
    probs = None if draft.probs is None else draft.probs[:, place : place + 1]
    places, asked = token.shape[1] + 1, _Asked.of(batch, rule, token.shape[1], place)
    one = batch.sampling.judged(Draft.chain(token, probs))
    decided = torch.where(finite[..., None], asked.decide(p), 0.0).expand(-1, places, -1)
    accepted, own = accept(one, decided, logits[:, place : place + places], rule, asked)
    chosen = torch.where(accepted > 0, token[:, 0], own) if token.shape[1] else own
    # Transfer everything at once: doubles hold every token id exactly.
    return torch.stack([chosen, accepted, finite[:, 0]], 1).double().cpu()


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
