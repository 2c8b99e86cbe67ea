"""The exact distribution of what a rule commits: a sum over all drafts and all masks, with no sampling."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.accept import Rule
from selfspec.draft import Draft


@dataclass(frozen=True)
class Chain:
    """A distribution over token sequences by its conditionals: `tables[i]` has shape `[vocab] * (i + 1)`."""

    tables: tuple[Tensor, ...]

    @property
    def vocab(self) -> int:
        return self.tables[0].shape[-1]

    def joint(self) -> Tensor:
        """Probability of every sequence, shape `[vocab] * len(tables)`."""
        joint = self.tables[0]
        for table in self.tables[1:]:
            joint = joint[..., None] * table
        return joint

    def along(self, tokens: Tensor) -> Tensor:
        """The conditionals met along each row of `tokens`, `[rows, len(tables), vocab]`."""
        return torch.stack(
            [table[tuple(tokens[:, :i].T)].expand(len(tokens), -1) for i, table in enumerate(self.tables)], 1
        )


@dataclass(frozen=True)
class Committed:
    """What a rule commits, summed up exactly.

    Attributes:
        joint: probability of every sequence of `drafted + 1` tokens, where a round that commits fewer is followed by
            draws from p, as the rounds after it would be.
        length: expected number of committed draft tokens.
    """

    joint: Tensor
    length: float

    @classmethod
    def of_parts(cls, parts: Sequence[Committed]) -> Committed:
        """The sum of parts that exclude each other and make up the whole."""
        return cls(torch.stack([part.joint for part in parts]).sum(0), sum(part.length for part in parts))


def committed(rule: Rule, p: Chain, q: Chain | None, drafts: Tensor | None = None) -> Committed:
    """Sum over drafts and masks.

    Args:
        rule: what judges.
        p: the target, with one conditional more than the draft has tokens.
        q: the draft's distribution; None for a deterministic draft.
        drafts: the one draft of a deterministic drafter, `[1, drafted]`.
    """
    drafted = len(p.tables) - 1
    if q is None:
        assert drafts is not None
        weights = torch.ones(1, dtype=p.tables[0].dtype)
    elif drafted == 0:
        drafts, weights, q = torch.empty(1, 0, dtype=torch.long), torch.ones(1, dtype=p.tables[0].dtype), None
    else:
        weights = q.joint().flatten()
        drafts = _all_drafts(p.vocab, drafted)
    return _summed(rule, p, q, drafts, weights)


def committed_when_cut(rule: Rule, p: Chain, q: Chain, chances: Tensor) -> Committed:
    """The same where a round commits no more tokens than a number that is drawn on its own.

    Args:
        rule: what judges.
        p: the target, with one conditional more than the draft has tokens, of which there is at least one.
        q: the draft's distribution.
        chances: of each number and of each draft: of 1, 2, ... `drafted + 1` tokens, `[vocab ** drafted, drafted + 1]`.
            They must be alike for all drafts, or the cut is not independent of the draft.
    """
    drafts, weights = _all_drafts(p.vocab, len(p.tables) - 1), q.joint().flatten()
    return Committed.of_parts(
        [_summed(rule, p, q, drafts, weights * chance, most) for most, chance in enumerate(chances.unbind(-1), 1)]
    )


def committed_in_step(
    rule: Rule, row: tuple[Chain, Chain], beside: tuple[Chain, Chain], goes_on: Sequence[Tensor]
) -> Committed:
    """What a row commits that is cut to what the row beside it would commit, where the two share the draft's length.

    Args:
        rule: what judges.
        row: p and q of the row.
        beside: p and q of the row beside it.
        goes_on: whether drafts go on after each pair of their beginnings of 1, 2, ... tokens, as the tokens of both
            rows decide, `[vocab ** tokens, vocab beside ** tokens]`.
    """
    (p, q), (p_beside, q_beside) = row, beside
    longest, parts = len(p.tables) - 1, []
    for drafted in range(1, longest + 1):
        ours, theirs = Chain(q.tables[:drafted]), Chain(q_beside.tables[:drafted])
        weights = ours.joint().flatten()[:, None] * theirs.joint().flatten()
        for earlier in range(1, min(drafted + 1, longest)):
            later = drafted - earlier
            decided = goes_on[earlier - 1] if later else ~goes_on[earlier - 1]
            # Drafts are in the order of their tokens, so those with one beginning stand together.
            decided = decided.repeat_interleave(p.vocab**later, 0)
            weights = weights * decided.repeat_interleave(p_beside.vocab**later, 1)
        chances = weights @ _tokens_by_draft(rule, p_beside, theirs)
        drafts = _all_drafts(p.vocab, drafted)
        parts += [_summed(rule, p, ours, drafts, chance, most) for most, chance in enumerate(chances.unbind(-1), 1)]
    return Committed.of_parts(parts)


def committed_with_stops(rule: Rule, p: Chain, q: Chain, goes_on: Sequence[Tensor]) -> Committed:
    """The same for drafts that end early, as the tokens drafted so far decide.

    Args:
        rule: what judges.
        p: the target, with one conditional more than the longest draft has tokens.
        q: the draft's distribution.
        goes_on: whether a draft goes on after each of its beginnings of 1, 2, ... tokens, `[vocab] * tokens`.
    """
    longest = len(p.tables) - 1
    parts = []
    for drafted in range(1, longest + 1):
        drafts = _all_drafts(p.vocab, drafted)
        weights = Chain(q.tables[:drafted]).joint().flatten()
        for earlier in range(1, drafted):
            weights = weights * goes_on[earlier - 1][tuple(drafts[:, :earlier].T)]
        if drafted < longest:
            weights = weights * ~goes_on[drafted - 1][tuple(drafts.T)]
        parts.append(_summed(rule, p, Chain(q.tables[:drafted]), drafts, weights))
    return Committed.of_parts(parts)


def _all_drafts(vocab: int, drafted: int) -> Tensor:
    """Every draft of so many tokens, in the order of its tokens, `[vocab ** drafted, drafted]`."""
    return torch.tensor(list(itertools.product(range(vocab), repeat=drafted)))


def _tokens_by_draft(rule: Rule, p: Chain, q: Chain) -> Tensor:
    """The chance of each draft that 1, 2, ... tokens of a round stand, `[drafts, drafted + 1]`."""
    drafted = len(q.tables)
    drafts = _all_drafts(p.vocab, drafted)
    p_rows = Chain(p.tables[: drafted + 1]).along(drafts)
    draft = Draft.chain(drafts, q.along(drafts))
    probs = rule.accept_probs(draft, p_rows, p_rows.log())
    chances = torch.zeros(len(drafts), drafted + 1, dtype=probs.dtype)
    for pattern in itertools.product([True, False], repeat=drafted):
        mask = torch.tensor(pattern, dtype=torch.bool).expand(len(drafts), drafted)
        chances[:, int(rule.accepted(mask, draft.tree)[0])] += torch.where(mask, probs, 1 - probs).prod(-1)
    # A draft that is never made has no chances, and no weight.
    return torch.where((q.joint().flatten() > 0)[:, None], chances, 0.0)


def _summed(
    rule: Rule, p: Chain, q: Chain | None, drafts: Tensor, weights: Tensor, most: int | None = None
) -> Committed:
    """The part of the sum that belongs to some drafts of one length, each with its weight.

    Of a run of more than `most` tokens the first so many are committed; draws from p follow.
    """
    drafts, weights = drafts[weights > 0], weights[weights > 0]
    drafted, vocab = drafts.shape[1], p.vocab
    joint = torch.zeros([vocab] * len(p.tables), dtype=weights.dtype)
    length = 0.0
    if not len(drafts):
        return Committed(joint, length)
    p_rows = Chain(p.tables[: drafted + 1]).along(drafts)
    draft = Draft.chain(drafts, None if q is None else q.along(drafts))
    probs = rule.accept_probs(draft, p_rows, p_rows.log())
    assert ((probs >= 0) & (probs <= 1)).all()
    for pattern in itertools.product([True, False], repeat=drafted):
        mask = torch.tensor(pattern, dtype=torch.bool).expand(len(drafts), drafted)
        chance = weights * torch.where(mask, probs, 1 - probs).prod(-1)
        count = rule.accepted(mask, draft.tree)
        follow = rule.recovery_probs(draft, p_rows, count)
        possible = chance > 0
        assert (follow[possible].sum(-1) > 0).all()
        follow = torch.where(possible[:, None], follow / follow.sum(-1, keepdim=True), torch.zeros(()).to(follow))
        stood = int(count[0])
        cut = most is not None and most <= stood
        if cut:
            assert most is not None
            stood = most
        length += stood * float(chance.sum())
        part = torch.zeros([vocab] * (stood + (not cut)), dtype=weights.dtype)
        index = tuple(drafts[:, :stood].T) if stood else ()
        if cut:
            part.index_put_(index, chance, accumulate=True)
        elif stood:
            part.index_put_(index, chance[:, None] * follow, accumulate=True)
        else:
            part += (chance[:, None] * follow).sum(0)
        for table in p.tables[part.dim() :]:
            part = part[..., None] * table
        joint += part
    return Committed(joint, length)
