"""Drafting with a model, its own or another: what chooses the tree that is grown, and learns from what is accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from selfspec.cache.tree import Tree
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import Drafter
from selfspec.draft.rank_chances import RankChances
from selfspec.draft.tree_growth import by_level

if TYPE_CHECKING:
    from selfspec.decode.batch import Batch
    from selfspec.decode.verdict import Verdict

# What siblings of each rank were accepted at on the models measured, and how many places that counts for.
CHANCES, WEIGHT = (0.65, 0.12, 0.05, 0.03, 0.02, 0.01), 16.0


class GrowingDrafter(Drafter):
    """Drafts with a model: a chain, or a tree where the control allows more nodes than levels."""

    @property
    def chances(self) -> tuple[float, ...]:
        """How often siblings of each rank are held to be accepted before any were."""
        return CHANCES

    def begin(self, batch: Batch) -> RankChances:
        return RankChances(self.chances, WEIGHT)

    def tree(self, batch: Batch, budget: Budget) -> Tree:
        """Choose the tree of a round, numbered by level."""
        # Logits processors with memory judge chains alone.
        if budget.nodes == budget.depth or batch.sampling.in_order:
            return Tree.chain(budget.depth)
        chances = self.state(batch)
        assert isinstance(chances, RankChances)
        return by_level(batch.controller.shape(chances.rates(), budget).tree)

    def learn(self, batch: Batch, draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        if draft.steps and batch.controller.most.nodes > batch.controller.most.depth:
            chances = self.state(batch)
            assert isinstance(chances, RankChances)
            for row in verdict.rows.values():
                chances.count(draft.tree, row.path)
