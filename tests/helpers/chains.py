"""Chains and trees for hypothesis: zeros, disjoint supports, p = q, one-hot, near-ties, in float32 and float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from helpers.exact import Chain, all_drafts
from selfspec.cache.tree import Tree

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
def tree_cases(draw: st.DrawFn, most: int = 6) -> Case:
    """Trees whose siblings are drawn with replacement, without it, or by whatever all nodes before them say."""
    tree = draw(trees(most))
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
