"""The exact distribution of what a rule commits: a sum over all drafts and all masks, with no sampling.

Drafts are trees, chains where no tree is given. The draft's q is a `Chain` over the nodes in order: the conditional of
a node may depend on all nodes before it. The target's p is one over the tokens of a path.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from selfspec.accept import Rule
from selfspec.cache.tree import Tree
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
    """What a rule commits: the chance of each text, draws from p behind a short round; how many draft tokens."""

    joint: Tensor
    length: float

    @classmethod
    def of_parts(cls, parts: Sequence[Committed]) -> Committed:
        """The sum of parts that exclude each other and make up the whole."""
        return cls(torch.stack([part.joint for part in parts]).sum(0), sum(part.length for part in parts))


def committed(
    rule: Rule, p: Chain, q: Chain | None, drafts: Tensor | None = None, tree: Tree | None = None
) -> Committed:
    """Sum over drafts and masks. Without q the only draft is `drafts`, `[1, nodes]`; without a tree it is a chain."""
    tree = tree or Tree.chain(len(p.tables) - 1)
    if q is None:
        assert drafts is not None
        weights = torch.ones(1, dtype=p.tables[0].dtype)
    elif not len(tree):
        drafts, weights, q = torch.empty(1, 0, dtype=torch.long), torch.ones(1, dtype=p.tables[0].dtype), None
    else:
        weights = q.joint().flatten()
        drafts = all_drafts(p.vocab, len(tree))
    return _summed(rule, p, _draft(drafts, tree, q), weights)


def committed_when_cut(rule: Rule, p: Chain, q: Chain, chances: Tensor, tree: Tree) -> Committed:
    """The same, cut to a number drawn on its own, with `chances` of 1, 2, ... tokens, `[vocab ** nodes, depth + 1]`."""
    return _cut(rule, p, _draft(all_drafts(p.vocab, len(tree)), tree, q), q.joint().flatten()[:, None] * chances)


def committed_in_step(
    rule: Rule,
    row: tuple[Chain, Chain],
    beside: tuple[Chain, Chain],
    goes_on: Sequence[Tensor],
    tree: Tree | None = None,
) -> Committed:
    """What a row, `(p, q)`, commits cut to what the row beside it would; drafts go on after pairs of beginnings."""
    (p, q), (p_beside, q_beside) = row, beside
    tree = tree or Tree.chain(len(p.tables) - 1)
    largest, parts = len(tree), []
    for nodes in range(1, largest + 1):
        ours, theirs, shape = Chain(q.tables[:nodes]), Chain(q_beside.tables[:nodes]), Tree(tree.parents[:nodes])
        weights = ours.joint().flatten()[:, None] * theirs.joint().flatten()
        for earlier in range(1, min(nodes + 1, largest)):
            later = nodes - earlier
            decided = goes_on[earlier - 1] if later else ~goes_on[earlier - 1]
            # Drafts are in the order of their tokens, so those with one beginning are next to each other.
            decided = decided.repeat_interleave(p.vocab**later, 0)
            weights = weights * decided.repeat_interleave(p_beside.vocab**later, 1)
        beside_it = _draft(all_drafts(p_beside.vocab, nodes), shape, theirs)
        chances = weights @ _by_tokens(rule, p_beside, beside_it)
        parts.append(_cut(rule, p, _draft(all_drafts(p.vocab, nodes), shape, ours), chances))
    return Committed.of_parts(parts)


def committed_with_stops(rule: Rule, p: Chain, q: Chain, goes_on: Sequence[Tensor], tree: Tree) -> Committed:
    """The same for drafts that end early: they go on after some beginnings of 1, 2, ... nodes, `[vocab] * nodes`."""
    largest, parts = len(tree), []
    for nodes in range(1, largest + 1):
        drafts = all_drafts(p.vocab, nodes)
        weights = Chain(q.tables[:nodes]).joint().flatten()
        for earlier in range(1, nodes):
            weights = weights * goes_on[earlier - 1][tuple(drafts[:, :earlier].T)]
        if nodes < largest:
            weights = weights * ~goes_on[nodes - 1][tuple(drafts.T)]
        draft = _draft(drafts, Tree(tree.parents[:nodes]), Chain(q.tables[:nodes]))
        parts.append(_summed(rule, p, draft, weights))
    return Committed.of_parts(parts)


def all_drafts(vocab: int, nodes: int) -> Tensor:
    """Every draft of that many nodes, in the order of its tokens, `[vocab ** nodes, nodes]`."""
    return torch.tensor(list(itertools.product(range(vocab), repeat=nodes)), dtype=torch.long)


def _at_places(p: Chain, tree: Tree, drafts: Tensor) -> Tensor:
    """The target's conditional at each place of each draft, `[drafts, nodes + 1, vocab]`."""
    paths = [drafts[:, list(path)] for path in ((), *tree.paths)]
    return torch.stack([p.tables[path.shape[1]][tuple(path.T)].expand(len(drafts), -1) for path in paths], 1)


def _by_place(rule: Rule, draft: Draft, p_places: Tensor) -> Tensor:
    """The chance of each draft that each place is the last accepted one, `[drafts, nodes + 1]`."""
    probs = rule.accept_probs(draft, p_places, p_places.log())
    assert ((probs >= 0) & (probs <= 1)).all()
    masks = torch.tensor(list(itertools.product([True, False], repeat=len(draft.tree))), dtype=torch.bool)
    chances = torch.where(masks, probs[:, None], 1 - probs[:, None]).prod(-1)
    return torch.zeros_like(p_places[..., 0]).index_add_(1, rule.accepted(masks, draft.tree), chances)


def _draft(drafts: Tensor, tree: Tree, q: Chain | None) -> Draft:
    return Draft(drafts, tree, None if q is None else q.along(drafts))


def _by_tokens(rule: Rule, p: Chain, draft: Draft) -> Tensor:
    """The chance of each draft that a round commits 1, 2, ... tokens, `[drafts, depth + 1]`."""
    chances = _by_place(rule, draft, _at_places(p, draft.tree, draft.tokens))
    tokens = torch.zeros(len(chances), draft.length + 1, dtype=chances.dtype)
    return tokens.index_add_(1, torch.tensor((0, *draft.tree.depths)), chances)


def _cut(rule: Rule, p: Chain, draft: Draft, chances: Tensor) -> Committed:
    """The part of drafts of one shape, cut to 1, 2, ... tokens with `chances`, `[drafts, depth + 1]`."""
    return Committed.of_parts(
        [_summed(rule, p, draft, chance, most) for most, chance in enumerate(chances.unbind(-1), 1)]
    )


def _summed(rule: Rule, p: Chain, draft: Draft, weights: Tensor, most: int | None = None) -> Committed:
    """The part of weighted drafts of one shape; behind a run, cut to `most` tokens, come draws from p."""
    draft, weights = draft.of_rows(weights.nonzero()[:, 0].tolist()), weights[weights > 0]
    tree, drafts = draft.tree, draft.tokens
    joint = torch.zeros([p.vocab] * len(p.tables), dtype=weights.dtype)
    length = 0.0
    if not len(drafts):
        return Committed(joint, length)
    p_places = _at_places(p, tree, drafts)
    chances = weights[:, None] * _by_place(rule, draft, p_places)
    for place, path in enumerate(((), *tree.paths)):
        chance = chances[:, place]
        follow = rule.recovery_probs(draft, p_places, torch.full((len(drafts),), place))
        possible = chance > 0
        assert (follow[possible].sum(-1) > 0).all()
        follow = torch.where(possible[:, None], follow / follow.sum(-1, keepdim=True), torch.zeros(()).to(follow))
        cut = most is not None and most <= len(path)
        tokens = drafts[:, list(path[:most])]
        length += tokens.shape[1] * float(chance.sum())
        part = torch.zeros([p.vocab] * (tokens.shape[1] + (not cut)), dtype=weights.dtype)
        if tokens.shape[1]:
            part.index_put_(tuple(tokens.T), chance if cut else chance[:, None] * follow, accumulate=True)
        else:
            part += (chance[:, None] * follow).sum(0)
        for table in p.tables[part.dim() :]:
            part = part[..., None] * table
        joint += part
    return Committed(joint, length)


_KINDS = ("dense", "peaked", "sparse", "one-hot", "near-tie")


@dataclass(frozen=True)
class Case:
    """A tree, how siblings are drawn, the target over its paths, and the draft distribution over its nodes in order."""

    tree: Tree
    drawn: str
    p: Chain
    q: Chain

    @property
    def tolerance(self) -> float:
        return 2e-6 if self.p.tables[0].dtype == torch.float32 else 1e-12

    def stops(self, generator: torch.Generator) -> list[Tensor]:
        """Whether drafts go on after each of their beginnings, at random."""
        shapes = ([self.p.vocab] * nodes for nodes in range(1, len(self.tree)))
        return [torch.rand(shape, generator=generator) < 0.55 for shape in shapes]


def _rows(kind: str, shape: list[int], generator: torch.Generator) -> Tensor:
    """Distributions over the last axis."""
    noise = torch.rand(shape, generator=generator, dtype=torch.float64) + 1e-3
    if kind == "peaked":
        noise = noise**20
    elif kind == "sparse":
        noise = noise * (torch.rand(shape, generator=generator) < 0.5)
        noise[..., 0] += noise.sum(-1) == 0
    elif kind == "one-hot":
        noise = torch.zeros_like(noise).scatter_(-1, noise.argmax(-1, keepdim=True), 1.0)
    elif kind == "near-tie":
        noise = 1.0 + 1e-9 * noise
    return noise / noise.sum(-1, keepdim=True)


def conditionals(vocab: int, lengths: range, generator: torch.Generator) -> Chain:
    """Conditionals of these numbers of tokens, none of which is 0, in float64."""
    return Chain(
        tuple(
            (2 * torch.randn([vocab] * length, generator=generator, dtype=torch.float64)).softmax(-1)
            for length in lengths
        )
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Chains: vocabularies of 2 to 64 and draft lengths 0 to 6, as long as the joint stays small."""
    drafted = draw(st.integers(0, 6))
    largest = {0: 64, 1: 64, 2: 16, 3: 6, 4: 4, 5: 3, 6: 2}[drafted]
    vocab = draw(st.integers(2, largest))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    p, q = [], []
    for position in range(drafted + 1):
        shape = [vocab] * (position + 1)
        p.append(_rows(draw(st.sampled_from(_KINDS)), shape, generator))
        relation = draw(st.sampled_from(["independent", "independent", "equal", "last bits", "disjoint"]))
        if relation == "equal":
            q.append(p[-1])
        elif relation == "last bits":
            nudged = p[-1] * (1 + 1e-7 * torch.rand(shape, generator=generator, dtype=torch.float64))
            q.append(nudged / nudged.sum(-1, keepdim=True))
        elif relation == "disjoint" and bool((p[-1] == 0).any(-1).all()):
            outside = (p[-1] == 0).double()
            q.append(outside / outside.sum(-1, keepdim=True))
        else:
            q.append(_rows(draw(st.sampled_from(_KINDS)), shape, generator))
    # Without a drafted token q is never looked at, but a chain has at least one conditional.
    p_chain, q_chain = (Chain(tuple(table.to(dtype) for table in each)) for each in (p, q[: max(drafted, 1)]))
    return Case(Tree.chain(drafted), "chain", p_chain, q_chain)


@st.composite
def trees(draw: st.DrawFn, most: int = 6) -> Tree:
    """Trees of 1 to `most` nodes, of any shape."""
    return Tree(tuple(draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, most)))))


@st.composite
def tree_cases(draw: st.DrawFn) -> Case:
    """Trees whose siblings are drawn with replacement, without it, or by whatever all nodes before them say."""
    tree = draw(trees())
    vocab = draw(st.integers(2, {1: 8, 2: 5, 3: 4, 4: 3, 5: 3, 6: 2}[len(tree)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    p = [_rows(draw(st.sampled_from(_KINDS)), [vocab] * (depth + 1), generator) for depth in range(tree.depth + 1)]
    # At each place what its children are drawn from if they are siblings in the usual sense.
    common = []
    for depth in (0, *tree.depths):
        table, relation = p[depth], draw(st.sampled_from(["independent", "independent", "equal", "last bits"]))
        if relation == "independent":
            table = _rows(draw(st.sampled_from(_KINDS)), [vocab] * (depth + 1), generator)
        elif relation == "last bits":
            table = table * (1 + 1e-7 * torch.rand(table.shape, generator=generator, dtype=torch.float64))
        common.append(table / table.sum(-1, keepdim=True))
    drawn = draw(st.sampled_from(["with replacement", "without replacement", "anyhow"]))
    q = []
    for node, path in enumerate(tree.paths):
        if drawn == "anyhow":
            q.append(_rows(draw(st.sampled_from(_KINDS)), [vocab] * (node + 1), generator))
            continue
        parent = tree.parents[node]
        earlier = [sibling for sibling in tree.children[parent + 1] if sibling < node]
        before = all_drafts(vocab, node)
        table = common[parent + 1][tuple(before[:, list(path[:-1])].T)].expand(len(before), -1)
        if drawn == "without replacement":
            table = without(table, before[:, earlier])
        q.append(table.reshape([vocab] * (node + 1)))
    return Case(tree, drawn, Chain(tuple(p)), Chain(tuple(q)))


def without(q: Tensor, drawn: Tensor) -> Tensor:
    """Of q `[rows, vocab]` what the next draw without replacement is from, after the tokens drawn, `[rows, tokens]`."""
    left = q.scatter(-1, drawn, 0.0) if drawn.shape[1] else q
    # Where all that q can draw has been drawn, the next sibling may be anything.
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, torch.ones_like(left))
    return left / left.sum(-1, keepdim=True)
