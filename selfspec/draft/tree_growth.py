"""Growing a draft level by level: a draft step reads all nodes of a level that have children, and draws these."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from selfspec.cache.tree import Tree
from selfspec.device import HostCopy, has_streams, to_device
from selfspec.draft.draft import Budget, Draft, Verdict
from selfspec.draft.drafter import MODEL, Proposer
from selfspec.draft.rows_view import RowsView
from selfspec.model.gated_view import ExactStates, Features
from selfspec.runtime.request import Chain, PassResult

Read = Callable[[Tensor, int], Tensor]
"""A draft step: maps tokens of consecutive nodes, `[rows, nodes]`, and the first node to `[rows, nodes, vocab]`."""

# Acceptance rates of siblings by rank on the models measured, and how many places they count for.
CHANCES, _WEIGHT = (0.65, 0.12, 0.05, 0.03, 0.02, 0.01), 16.0
# Sizes of trees without draft steps.
_SIZES = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)


class GrowingProposer(Proposer):
    """Drafts with a model: a chain, or a tree if the controller allows more nodes than levels."""

    def __init__(self, chances: Sequence[float] = CHANCES) -> None:
        self._chances = RankChances(chances, _WEIGHT)

    def tree(self, rows: RowsView, budget: Budget) -> Tree:
        """Choose the tree of a round, numbered by level."""
        if budget.nodes == budget.depth or rows.chains_only:
            return Tree.chain(budget.depth)
        return by_level(rows.controller.shape(self._chances.rates(), budget))

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        if draft.steps and rows.controller.most.nodes > rows.controller.most.depth:
            for row in verdict.rows.values():
                self._chances.count(draft.tree, row.path)


class FeatureProposer(GrowingProposer):
    """Grows drafts from states of the target. A prompt of one token has no such state before the first round."""

    @abstractmethod
    def add(self, rows: RowsView, features: Features, places: Sequence[Sequence[int]]) -> None:
        """Take over the target's states at `places` of a pass, for each running row; embeddings have no `features`."""

    @abstractmethod
    def known(self, rows: RowsView) -> Sequence[bool]:
        """Return, for each running row, whether it has a state to draft from."""

    @abstractmethod
    def reader(self, rows: RowsView, tree: Tree) -> Read:
        """Return the function that reads the nodes of a draft: see `grow`."""

    def read_prompt(self, rows: RowsView, counts: Sequence[int], features: Features) -> None:
        self.add(rows, features, [range(count) for count in counts])

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        super().learn(rows, draft, target, verdict)
        self.add(rows, target.features, committed_places(rows, verdict))

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        if not any(self.known(rows)) or not rows.controller.tries(MODEL):
            return rows.no_draft()
        tree = self.tree(rows, budget)
        return grow(rows, tree, self.reader(rows, tree))


class KeepingProposer(FeatureProposer):
    """Grows drafts from a tensor kept of each row: by default the target's state before the last token."""

    row_states: list[Tensor | None]

    def __init__(self, rows: int, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.row_states = [None] * rows
        self._weights = sum(weight.nbytes for module in modules for weight in module.parameters())

    @property
    def nbytes(self) -> int:
        return self._weights + self.row_bytes

    def add(self, rows: RowsView, features: Features, places: Sequence[Sequence[int]]) -> None:
        states = features.get("normed")
        for number, (row, chosen) in enumerate(zip(rows.running, places, strict=True)):
            if chosen and states is not None:
                self.row_states[row] = states[number, chosen[-1]].clone()

    def known(self, rows: RowsView) -> Sequence[bool]:
        return [self.row_states[row] is not None for row in rows.running]

    def stacked(self, rows: RowsView) -> Tensor:
        """Return the kept tensors of the running rows, `[rows, ...]`; zeros for rows without one."""
        some = next(kept for kept in self.row_states if kept is not None)
        kept = (self.row_states[row] for row in rows.running)
        return torch.stack([torch.zeros_like(some) if each is None else each for each in kept])


def committed_places(rows: RowsView, verdict: Verdict) -> list[Sequence[int]]:
    """Return the places of each running row's committed tokens in the pass; the last new token has none yet."""
    found = [verdict.rows.get(row) for row in rows.running]
    return [() if row is None else [node + 1 for node in (-1, *row.path)][: len(row.tokens)] for row in found]


def of_levels(tree: Tree, logits: Callable[[int], Tensor]) -> Read:
    """Return a draft step whose logits, `[rows, 1, vocab]`, depend on the level of the nodes that it reads alone."""

    def read(tokens: Tensor, first: int) -> Tensor:
        return logits(0 if first < 0 else tree.depths[first]).expand(-1, tokens.shape[1], -1)

    return read


def grow(rows: RowsView, tree: Tree, read: Read) -> Draft:
    """Draft a tree that `by_level` numbered, or its first levels if the controller ends the draft.

    Siblings are drawn without replacement: each from q without its earlier siblings, normalised. That is Gumbel top-k
    (Kool et al., 2019, arXiv 1903.06059) in the order of its scores. Greedy siblings are the likeliest tokens; in a
    coupled draft, their position's noise chooses them. None is left out because of its score.
    """
    rows.open_block(tree)
    growth = growth_of(tree, rows.last_tokens.device)
    tokens, probs, steps = [rows.last_tokens[:, :0]], [], 0
    for level in growth.levels:
        reads = rows.last_tokens if level.first < 0 else _picked(tokens, level.draws)
        scores = left = _scores(rows, read(reads, level.first), tokens, level)
        for rank, nodes in enumerate(level.families):
            if rank:
                left = left[:, :nodes].scatter(-1, tokens[-1][:, :nodes, None], -torch.inf)
            drawn = rows.draw_draft(left, level.first, sum(each.shape[1] for each in tokens))
            tokens.append(drawn.token)
            if drawn.q is not None:
                probs.append(drawn.q)
        steps += 1
        if steps < len(growth.levels) and not rows.controller.goes_on(Confidences.of(scores)):
            tree = upper_levels(tree, steps)
            growth = growth_of(tree, rows.last_tokens.device)
            break
    drawn_from = _picked([torch.cat(probs, 1)], growth.draws) if probs else None
    return Draft(_picked([torch.cat(tokens, 1)], growth.draws), tree, drawn_from, steps=steps)


def follow(rows: RowsView, chain: Chain, most: int, states: list[ExactStates]) -> Draft:
    """Draft along a chain of at most `most` steps, until the controller ends the draft; add what they left."""
    tokens: list[Tensor] = []
    with closing(chain.steps) as steps:
        for step in steps:
            tokens.append(step.token)
            if step.states is not None:
                states.append(step.states)
            known = step.confidences
            confidences: Callable[[], list[float]] = (
                Confidences(known) if isinstance(known, Tensor) else partial(list, known)
            )
            if len(tokens) == most or not rows.controller.goes_on(confidences):
                break
    probs = None if chain.probs is None else chain.probs[:, : len(tokens)]
    return Draft.chain(torch.cat(tokens, 1), probs, steps=len(tokens))


@dataclass(frozen=True)
class Level:
    """Describes one draft step, which reads nodes from number `first` on."""

    first: int
    draws: Tensor | None  # that gave each node's token, `[nodes]`; None: a single node, whose path holds all so far
    paths: tuple[list[int], ...]  # numbers of the draws on the path to each node
    families: tuple[int, ...]  # nodes with a first child, a second, and so on; those with most children come first


@dataclass(frozen=True)
class Growth:
    """Holds a tree's draft steps and each node's draw, `[nodes]`; None: draws are in the order of nodes."""

    levels: tuple[Level, ...]
    draws: Tensor | None


@lru_cache(maxsize=64)
def growth_of(tree: Tree, device: torch.device) -> Growth:
    """Return the growth of a tree that is numbered by level."""
    draws: dict[int, int] = {}
    levels = []
    inner = [-1, *(node for node in range(len(tree)) if tree.children[node + 1])]
    for depth in range(tree.depth):
        reads = [node for node in inner if (tree.depths[node] if node >= 0 else 0) == depth]
        children = [tree.children[node + 1] for node in reads]
        families = tuple(sum(len(each) > rank for each in children) for rank in range(len(children[0])))
        paths = tuple([draws[each] for each in tree.paths[node]] if depth else [] for node in reads)
        is_chain = paths == (list(range(len(draws))),)
        picked = None if is_chain else to_device([path[-1] for path in paths], device)
        levels.append(Level(reads[0], picked, paths, families))
        for rank, nodes in enumerate(families):
            draws |= {each[rank]: len(draws) + place for place, each in enumerate(children[:nodes])}
    order = [draws[node] for node in range(len(tree))]
    return Growth(tuple(levels), None if order == sorted(order) else to_device(order, device))


@lru_cache(maxsize=256)
def by_level(tree: Tree) -> Tree:
    """Renumber a tree: nodes with children by level, most children first, then leaves, so that a `Resume` fits."""
    inner: list[int] = []
    leaves: list[int] = []
    level = [-1]
    while level:
        below = [child for node in level for child in tree.children[node + 1]]
        below.sort(key=lambda node: -len(tree.children[node + 1]))
        level = [node for node in below if tree.children[node + 1]]
        inner += level
        leaves += below[len(level) :]
    numbers = {-1: -1, **{node: number for number, node in enumerate([*inner, *leaves])}}
    return Tree(tuple(numbers[tree.parents[node]] for node in [*inner, *leaves]))


@lru_cache(maxsize=256)
def upper_levels(tree: Tree, depth: int) -> Tree:
    """Return a tree's nodes down to a depth, numbered by level."""
    kept = [node for node in range(len(tree)) if tree.depths[node] <= depth]
    return by_level(Tree(tuple(-1 if tree.parents[node] < 0 else kept.index(tree.parents[node]) for node in kept)))


def _scores(rows: RowsView, logits: Tensor, tokens: Sequence[Tensor], level: Level) -> Tensor:
    """Return the scores to draw each node's children by, `[rows, nodes, vocab]`, given the node's path."""
    if not rows.reads_prefixes or level.draws is None:
        return rows.draft_scores(logits, tokens)
    drawn = torch.cat(list(tokens), 1)
    each = zip(logits.split(1, 1), level.paths, strict=True)
    return torch.cat([rows.draft_scores(logits, [drawn[:, path]]) for logits, path in each], 1)


class Confidences:
    """Gives the largest probability at each row's first place of a draft step, `[rows]`; 0 for NaN.

    Calling it waits for the device, unless `start` was called and the host has waited since.
    """

    def __init__(self, largest: Tensor) -> None:
        self.waits = has_streams(largest.device)
        self._values: Callable[[], Tensor] = lambda: largest
        self._copy: HostCopy | None = None

    @classmethod
    def of(cls, scores: Tensor) -> Confidences:
        """Return those of scores, `[rows, places, vocab]`, which are looked at only if they are asked for."""
        found = cls(scores)
        found._values = lambda: scores[:, 0].softmax(-1).amax(-1).nan_to_num(0.0)
        return found

    def start(self) -> HostCopy:
        """Ask for them now, behind what the device has to do."""
        if self._copy is None:
            self._copy = HostCopy(self._values())
            del self._values
        return self._copy

    def __call__(self) -> list[float]:
        confidences: list[float] = self.start().read().tolist()
        return confidences


def _picked(draws: Sequence[Tensor], order: Tensor | None) -> Tensor:
    """Return draws in the given order, `[rows, nodes, ...]`; None: the last draws unchanged."""
    return draws[-1] if order is None else torch.cat(list(draws), 1)[:, order]


class RankChances:
    """Estimates acceptance rates of siblings by rank where their place is reached; the prior weighs `weight` places."""

    def __init__(self, rates: Sequence[float], weight: float) -> None:
        # How often each rank was accepted, and how often its place was reached, `[2, ranks]`.
        self.counts = np.array([[weight * rate for rate in rates], [weight] * len(rates)])

    def rates(self) -> tuple[float, ...]:
        """Return each rank's acceptance rate, never rising, rounded to 1/50 so that tree shapes change rarely."""
        accepted, reached = self.counts.tolist()
        rates = (round(50 * each / places) / 50 for each, places in zip(accepted, reached, strict=True))
        return tuple(accumulate(rates, min))

    def count(self, tree: Tree, path: Sequence[int]) -> None:
        """Count the siblings accepted along a path; ranks beyond those of `counts` are ignored."""
        ranks = range(self.counts.shape[1])
        for place, accepted in zip((-1, *path), (*path, None), strict=True):
            for rank, node in zip(ranks, tree.children[place + 1], strict=False):
                self.counts[:, rank] += node == accepted, 1


@dataclass(frozen=True)
class Shape:
    """Holds a tree, siblings likeliest first, and the draft tokens that it commits in expectation."""

    tree: Tree
    expected: float


def best_shape(chances: Sequence[float], cost: Callable[[int], float], most: Budget) -> Shape:
    """Return the tree within `most` that commits most for its `cost` in plain steps; `chances` are rates by rank."""
    shapes = [largest_products(tuple(chances), size, most.depth) for size in sizes_within(most.nodes)]
    return max(shapes, key=lambda shape: (1 + shape.expected) / cost(len(shape.tree)))


def sizes_within(nodes: int) -> list[int]:
    """Return the sizes of trees to try: few, so that few kinds of passes need a program."""
    return [size for size in _SIZES if size <= nodes]


@lru_cache(maxsize=256)
def largest_products(chances: tuple[float, ...], nodes: int, depth: int) -> Shape:
    """Return the tree of `nodes` nodes that commits most if a rank has the same acceptance rate at every place.

    It holds the largest products of rates along paths (Sequoia, Chen et al., 2024, arXiv 2402.12374); it has fewer
    nodes if `depth` has no room for more.
    """
    parents: list[int] = []
    expected = 0.0
    # The next node of each family: the chance of its path, in the order in which families began; then its family.
    families = [(-chances[0], -1, 0, 1, 1.0)] if depth else []
    while families and len(parents) < nodes:
        loss, parent, rank, level, reached = heapq.heappop(families)
        expected -= loss
        parents.append(parent)
        if rank + 1 < len(chances):
            heapq.heappush(families, (-reached * chances[rank + 1], parent, rank + 1, level, reached))
        if level < depth:
            heapq.heappush(families, (loss * chances[0], len(parents) - 1, 0, level + 1, -loss))
    return Shape(Tree(tuple(parents)), expected)
