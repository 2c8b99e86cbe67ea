"""Drafting with a model, the target or another: choosing the tree to grow, and learning from accepted tokens."""

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

# Acceptance rates of siblings by rank on the models measured, and how many places they count for.
CHANCES, _WEIGHT = (0.65, 0.12, 0.05, 0.03, 0.02, 0.01), 16.0


class RankChances:
    """Estimates the acceptance rate of the first, second, ... child of a place that is reached.

    The prior is `rates`, which counts for `weight` places.

    Attributes:
        counts: how often each rank was accepted, and how often its place was reached, `[2, ranks]`.
    """

    def __init__(self, rates: Sequence[float], weight: float) -> None:
        self.counts = np.array([[weight * rate for rate in rates], [weight] * len(rates)])

    def rates(self) -> tuple[float, ...]:
        """Return the acceptance rate of each rank, which never rises from one rank to the next.

        Rates are rounded to one part in fifty, so that shapes of trees change rarely.
        """
        accepted, reached = self.counts.tolist()
        rates = (round(50 * each / places) / 50 for each, places in zip(accepted, reached, strict=True))
        return tuple(accumulate(rates, min))

    def count(self, tree: Tree, path: Sequence[int]) -> None:
        """Count which siblings were accepted along a path of a tree.

        In a union, other sources put their nodes beside a model's; ranks beyond those of `counts` are ignored.
        """
        ranks = range(self.counts.shape[1])
        for place, accepted in zip((-1, *path), (*path, None), strict=True):
            for rank, node in zip(ranks, tree.children[place + 1], strict=False):
                self.counts[:, rank] += node == accepted, 1


class GrowingProposer(Proposer):
    """Drafts with a model: a chain, or a tree where the controller allows more nodes than levels.

    `chances` are the acceptance rates of siblings by rank that it assumes at first.
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
