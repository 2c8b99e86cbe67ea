"""Judge a draft: find the tokens that each row accepts, the token after them, and where the row ends.

Rows whose processors have memory are judged group by group and place by place; all other rows are judged together, all
places at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from selfspec.accept import Rule
from selfspec.accept.tree_paths import tree_tables
from selfspec.cache.tree import Tree
from selfspec.decode.accept_draws import accept, effective
from selfspec.decode.batch import Batch
from selfspec.decode.judge_in_order import judge_in_order
from selfspec.device import to_device
from selfspec.draft import Draft
from selfspec.draft.verdict import RowVerdict, Verdict


def judge(batch: Batch, draft: Draft, logits: Tensor, rule: Rule) -> Verdict:
    """Judge the draft of a round. Waits for the device.

    If a processor or criterion of isolated rows raises, their group stores the error, and they end without this round.

    Args:
        batch: before the round is committed.
        draft: of the round.
        logits: the target's own, `[rows, nodes + 1, vocab]`.
        rule: accepts or rejects draft tokens.
    """
    for group in batch.groups:
        # An error at a draft token of the last round may not occur again.
        group.error = None
    in_order = [index for index, group in enumerate(batch.groups) if group.sampling.in_order]
    if not in_order:
        return judge_together(batch, draft, logits, rule)
    together = [index for index in range(len(batch.groups)) if index not in in_order]
    found: dict[int, RowVerdict] = {}
    last_tokens = batch.last_tokens.clone()
    for groups in [*([together] if together else []), *([index] for index in in_order)]:
        part = batch.part(groups)
        judged = judge_together if groups is together else _judge_group
        rows = to_device(part.rows, logits.device)
        verdict = judged(part.batch, draft.of_rows(part.rows), logits[rows], rule)
        found |= {part.numbers[number]: row for number, row in verdict.rows.items()}
        last_tokens[rows] = verdict.last_tokens
    return Verdict(tuple(batch.running), {number: found[number] for number in sorted(found)}, last_tokens)


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
        row: RowVerdict(drafted, (), 0, [], 0, ended=True, finite=True, overlap=[])
        for row, drafted in zip(batch.running, draft.tokens.tolist(), strict=True)
        if row in batch.unfinished
    }
    return Verdict(tuple(batch.running), rows, batch.last_tokens)


def judge_together(batch: Batch, draft: Draft, logits: Tensor, rule: Rule) -> Verdict:
    """Judge all places of a draft at once, then wait for the device: the only synchronisation of the round.

    Arguments as in `judge`. No processor has memory.
    """
    lengths = batch.row_lengths(draft)
    accepted = _accept(batch, draft, lengths, logits, rule) if draft.length else _next(batch, draft, logits)
    judged = _on_host(batch, draft, lengths, accepted)
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


@dataclass(frozen=True)
class _Accepted:
    """The accepted part of a draft and the target's own token after it.

    Attributes:
        place: place of the deepest accepted node, `[rows]`.
        count: number of accepted draft tokens, `[rows]`; in a chain equal to `place`.
        token: the token after them, drawn from the residual or the bonus token, `[rows]`.
        finite: whether the target's logits there were finite; if not, `token` is arbitrary, `[rows]`.
        overlap: see `Effective`.
        block: the last committed token and the draft tokens; of a tree the accepted path alone, `[rows, places]`.
        logits: the target's own at these places, `[rows, places, vocab]`.
        scores: the logits after processors and warpers.
    """

    place: Tensor
    count: Tensor
    token: Tensor
    finite: Tensor
    overlap: Tensor
    block: Tensor
    logits: Tensor
    scores: Tensor

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


def _accept(batch: Batch, draft: Draft, lengths: Sequence[int], logits: Tensor, rule: Rule) -> _Accepted:
    """Accept draft tokens and draw the token after them. Nothing waits for the device here."""
    sampling = batch.sampling
    scores = _scores(batch, draft, logits)
    p = sampling.probabilities(scores)
    finite = p.sum(-1).isfinite()
    # A draft token may cause logits that are not finite; then processors must not replace them.
    finite &= logits.amax(-1).isfinite()
    seen = effective(batch, draft, p, finite, batch.cache.positions(p.shape[1]) + 1)
    judged = within(draft, lengths)
    if judged is not None:
        seen = replace(seen, draft=ended(seen.draft, judged, seen.p))
    place, token = accept(batch, seen, logits, rule, judged=judged)
    block = torch.cat([batch.last_tokens, draft.tokens], 1)
    finite = finite.gather(1, place[:, None])[:, 0]
    accepted = _Accepted(place, place, token, finite, seen.overlap, block, logits, scores)
    return accepted if draft.tree.is_chain else accepted.along_path(draft.tree)


def _next(batch: Batch, draft: Draft, logits: Tensor) -> _Accepted:
    """Draw the next token of a round without a draft, in which the rule has nothing to judge."""
    sampling = batch.sampling
    scores = _scores(batch, draft, logits)
    found = sampling.next_tokens(scores, batch.cache.positions(1) + 1, batch.noise)
    token = found.tokens[:, 0]
    none = torch.zeros_like(token)
    tests = [each for each in (found.finite, sampling.legible(logits)) if each is not None]
    finite = reduce(torch.logical_and, tests)[:, 0] if tests else torch.ones_like(token, dtype=torch.bool)
    return _Accepted(none, none, token, finite, scores.new_empty(len(scores), 0), batch.last_tokens, logits, scores)


def _scores(batch: Batch, draft: Draft, logits: Tensor) -> Tensor:
    """Return the logits after processors and warpers, each place processed with the prefix of its path."""
    sampling, tree = batch.sampling, draft.tree
    if tree.is_chain or not sampling.reads_prefixes:
        return sampling.scores(logits, [draft.tokens])
    scores = torch.empty_like(logits, dtype=torch.float32)
    for node, path in enumerate(tree.paths):
        if not tree.children[node + 1]:
            places = [0, *(each + 1 for each in path)]
            scores[:, places] = sampling.scores(logits[:, places], [draft.tokens[:, list(path)]])
    return scores


def _on_host(batch: Batch, draft: Draft, lengths: Sequence[int], accepted: _Accepted) -> dict[int, RowVerdict]:
    """Return the verdict on each unfinished row, by row: the accepted tokens and the target's token after them."""
    paths, nodes = ((), *draft.tree.paths), len(draft.tree)
    columns = torch.stack([accepted.token, accepted.place, accepted.finite], 1)
    if nodes:
        # Transfer everything at once: doubles hold every token id exactly.
        columns = torch.cat([columns.double(), draft.tokens.double(), accepted.overlap.double()], 1)
    judged = {}
    for row, length, numbers in zip(batch.running, lengths, columns.tolist(), strict=True):
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


def lockstep_limit(batch: Batch, draft: Draft, runs: Sequence[Sequence[int]]) -> int:
    """Return the most tokens that a row commits in this round: with lockstep, as many as the slowest row.

    Some processors and stopping criteria need lockstep (`Batch.needs_lockstep`). Otherwise the controller chooses it
    where all rows are at one place, because a pass over rows at different places needs a mask and scattered writes.

    Lockstep leaves the output exact. Let T be the number of tokens that the rule lets a row commit, and M the number
    that the other rows allow. After k tokens and given T > k, the next token is distributed as p: over all T it is, and
    given T <= k it is drawn again in the next round. M depends on other drafts and other draws and is independent of
    that token; so given T > k and M > k it is distributed as p too, and is drawn again otherwise. Rows share their
    draft length, which may also depend on this row's draft tokens. But under the rules here the chance that k tokens of
    a draft are accepted does not depend on how the draft continues, so M does not either. Dropping tokens for their
    values, or for how many were accepted in their own row, would bias the output.

    tests/accept/test_cut.py proves this in closed form, tests/decode/test_lockstep.py by samples of the whole loop.

    Args:
        batch: before the round is committed.
        draft: of the round.
        runs: of each unfinished row, the accepted tokens and the target's token after them. A row whose logits are not
            finite may have none; it does not hold up other rows if the controller chose lockstep.
    """
    whole = draft.length + 1
    if not batch.in_lockstep:
        return whole
    return min((len(run) for run in runs if run or batch.needs_lockstep), default=whole)


def within(draft: Draft, lengths: Sequence[int]) -> Tensor | None:
    """Return whether each node is judged in each row, `[rows, nodes]`; None: all are.

    Near the end of a text the draft is as long as the row with most tokens left can use, and a look-up drafts for all
    rows if it finds tokens for one. Where tokens are drawn, each row judges no more than it would alone
    (`Batch.row_lengths`), so it draws the same tokens as alone: places have the same noise.

    For any rule a draft ends at a place where q is 0: the residual max(p - 0, 0) is p, and no later node is accepted.
    The length depends on committed tokens alone, so the output stays exact.
    """
    if min(lengths) == draft.tree.depth:
        return None
    device = draft.tokens.device
    limits = to_device(lengths, device)
    if draft.tree.is_chain:
        return torch.arange(1, draft.length + 1, device=device) <= limits[:, None]
    return tree_tables(draft.tree, device).depths[1:] <= limits[:, None]


def ended(draft: Draft, judged: Tensor, p: Tensor) -> Draft:
    """Return the draft with q set to zeros where it is not judged.

    Args:
        draft: of the round.
        judged: from `within`, `[rows, nodes]`.
        p: the target's, `[rows, nodes + 1, vocab]`; gives the shape of q if the draft was not drawn.
    """
    probs = draft.probs
    if probs is None:
        probs = torch.zeros_like(p[:, 1:]).scatter_(-1, draft.tokens[..., None], 1.0)
    return replace(draft, probs=probs * judged[..., None])
