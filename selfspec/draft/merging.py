"""Drafting without a model: the offers of all sources are merged into one tree, by their acceptance rates so far."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from selfspec.cache.tree import Tree
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import FreeProposer
from selfspec.draft.offer import Merged, Offer, Outcome, Trust, likeliest_path, merged
from selfspec.draft.rows_apart import chains, guesses, last_known
from selfspec.draft.rows_view import RowsView
from selfspec.draft.verdict import Verdict
from selfspec.runtime.runner import PassResult


class MergingProposer(FreeProposer):
    """Drafts a tree from the offers to each row. Nothing is drawn, so q is one-hot at each node.

    Rows share the shape of a tree. So where rows are apart, each has a chain instead, from the offers to it alone.

    Attributes:
        proposed: its last draft, whether or not the round took it.
        offered: the offers that this draft was made from, by running row.
    """

    def __init__(self, rows: RowsView) -> None:
        self.rows_apart = rows.rows_apart
        self._trust: defaultdict[int, Trust] = defaultdict(Trust)
        self.proposed: Draft | None = None
        self.offered: Sequence[tuple[Offer, ...]] = ()

    @abstractmethod
    def offers(self, rows: RowsView, budget: Budget) -> list[tuple[Offer, ...]]:
        """Return the offers of all sources to each running row."""

    def trust(self, row: int) -> Trust:
        """Return the trust in offers to a row: its own where rows are apart, else the one that all rows share."""
        return self._trust[row if self.rows_apart else -1]

    def look_up(self, rows: RowsView, budget: Budget) -> Draft:
        """Propose a tree; none if no unfinished row has an offer, or no tree would pay."""
        self.offered = self.offers(rows, budget)
        if self.rows_apart:
            self.proposed = self._chains(rows, budget)
            return self.proposed
        going = [(index, row) for index, row in enumerate(rows.running) if row in rows.unfinished]

        def promise(nodes: int, committed: float) -> float:
            return (1 + committed) / rows.controller.round_cost(0, nodes)

        reach = [self.trust(row).reach(self.offered[index]) for index, row in going]
        found = merged(reach, budget, promise, branches=not rows.chains_only)
        if not found.parents:
            return rows.no_draft()
        # The row with the shortest match limits the batch. A match of 1 is a recycled candidate.
        least = min(max((offer.kind for offer in self.offered[index]), default=0) for index, _ in going)
        self.proposed = Draft(filled(rows, found), Tree(found.parents), match_length=max(least, 2))
        return self.proposed

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        if self.rows_apart:
            self._learn_apart(draft, verdict)
        elif draft is self.proposed:
            for row, offers in zip(verdict.running, self.offered, strict=True):
                if row in verdict.rows:
                    found = verdict.rows[row]
                    self.trust(row).count(offers, Outcome(draft.tree, found.drafted, found.path))

    def _chains(self, rows: RowsView, budget: Budget) -> Draft:
        found = [
            likeliest_path(self.trust(row).reach(offers), rows.budget_of(row, budget).depth)
            if row in rows.unfinished
            else ()
            for row, offers in zip(rows.running, self.offered, strict=True)
        ]
        return chains(rows, found, match_length=2)

    def _learn_apart(self, draft: Draft, verdict: Verdict) -> None:
        """Learn from the rows that drafted with this proposer's chains, whatever the other rows drafted with."""
        lengths = self.proposed.row_lengths if self.proposed is not None and draft.length else None
        for row, offers, length in zip(verdict.running, self.offered, lengths or (), strict=lengths is not None):
            if length and row in verdict.rows:
                found = verdict.rows[row]
                self.trust(row).count(offers, Outcome(Tree.chain(length), found.drafted, found.path[:length]))


def filled(rows: RowsView, found: Merged) -> Tensor:
    """Return the tokens of merged nodes, `[rows, nodes]`.

    Where a row has none, its last token fills in: any guess keeps the output exact.
    """
    last = last_known(rows)
    tokens = [[token] * len(found.parents) for token in last]
    going = [index for index, row in enumerate(rows.running) if row in rows.unfinished]
    for index, row in zip(going, found.tokens, strict=True):
        tokens[index] = [last[index] if token is None else token for token in row]
    return guesses(rows, tokens)
