"""Drafting with a model, its own or another: what chooses the tree that is grown, and learns from what is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from selfspec.cache.tree import Tree
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import Proposer
from selfspec.draft.rows_view import RowsView
from selfspec.draft.tree_growth import by_level
from selfspec.draft.verdict import Verdict
from selfspec.runtime.runner import PassResult

# What siblings of each rank were accepted at on the models measured, and how many places that counts for.
CHANCES, _WEIGHT = (0.65, 0.12, 0.05, 0.03, 0.02, 0.01), 16.0


class RankChances:
    """How often the first, second, ... child of a place is accepted where the place is reached.

    At first they are held to be `rates`, which counts for `weight` places.

    Attributes:
        counts: how often each rank was accepted, and how often its place was reached, `[2, ranks]`.
    """

    def __init__(self, rates: Sequence[float], weight: float) -> None:
        self.counts = np.array([[weight * rate for rate in rates], [weight] * len(rates)])

    def rates(self) -> tuple[float, ...]:
        """Return the chance of each rank.

        To one part in fifty, so that shapes of trees change rarely; and no rank's above that of the one before it.
        """
        accepted, reached = self.counts.tolist()
        rates = (round(50 * each / places) / 50 for each, places in zip(accepted, reached, strict=True))
        return tuple(accumulate(rates, min))

    def count(self, tree: Tree, path: Sequence[int]) -> None:
        """Count which siblings were accepted along a path of a tree.

        In a union other sources put their nodes beside a model's: of ranks beyond its own nothing is learnt.
        """
        ranks = range(self.counts.shape[1])
        for place, accepted in zip((-1, *path), (*path, None), strict=True):
            for rank, node in zip(ranks, tree.children[place + 1], strict=False):
                self.counts[:, rank] += node == accepted, 1


class GrowingProposer(Proposer):
    """Drafts with a model: a chain, or a tree where the control allows more nodes than levels.

    `chances` is how often siblings of each rank are held to be accepted before any were.
    """

    def __init__(self, chances: Sequence[float] = CHANCES) -> None:
        self._chances = RankChances(chances, _WEIGHT)

    def tree(self, rows: RowsView, budget: Budget) -> Tree:
        """Choose the tree of a round, numbered by level."""
        if budget.nodes == budget.depth or rows.chains_only:
            return Tree.chain(budget.depth)
        return by_level(rows.controller.shape(self._chances.rates(), budget).tree)

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        if draft.steps and rows.controller.most.nodes > rows.controller.most.depth:
            for row in verdict.rows.values():
                self._chances.count(draft.tree, row.path)
