"""Drafting without a model from what sources offer: one tree of it, by how often such offers were accepted."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.cache.tree import Tree
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.draft_state import DraftState
from selfspec.draft.drafter import Drafter
from selfspec.draft.offer import Merged, Offer, Outcome, Trust, likeliest_path, merged
from selfspec.draft.rows_apart import chains
from selfspec.model.adapter import Adapter

if TYPE_CHECKING:
    from selfspec.decode.batch import Batch
    from selfspec.decode.verdict import Verdict


class MergingDrafter(Drafter):
    """Drafts a tree of what is offered to each row. Nothing is drawn, so q is one-hot at each node.

    Rows share the shape of a tree. So where rows are apart each has a chain, of what is offered to it alone.
    """

    @abstractmethod
    def offers(self, batch: Batch, budget: Budget) -> list[tuple[Offer, ...]]:
        """Return what is offered to each running row, by every source."""

    def check(self, depth: int) -> None:
        return

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        adapter.check_trees(model)

    def propose(self, batch: Batch, budget: Budget) -> Draft:
        found = self.look_up(batch, budget)
        return found if found.length and batch.controller.tries(found.match_length) else batch.no_draft()

    def look_up(self, batch: Batch, budget: Budget) -> Draft:
        """Propose a tree; none where nothing is offered to an unfinished row, or nothing would pay."""
        state = self._merging_state(batch)
        state.offered = self.offers(batch, budget)
        if batch.rows_apart:
            state.proposed = self._chains(batch, state, budget)
            return state.proposed
        going = [(index, row) for index, row in enumerate(batch.running) if row in batch.unfinished]

        def promise(nodes: int, committed: float) -> float:
            return (1 + committed) / batch.controller.round_cost(0, nodes)

        reach = [state.trust(row).reach(state.offered[index]) for index, row in going]
        # Logits processors with memory judge chains alone.
        found = merged(reach, budget, promise, branches=not batch.sampling.in_order)
        if not found.parents:
            return batch.no_draft()
        # What a batch can hope for is set by the row with least to go by. A match of 1 is a recycled candidate.
        least = min(max((offer.kind for offer in state.offered[index]), default=0) for index, _ in going)
        state.proposed = Draft(filled(batch, found), Tree(found.parents), match_length=max(least, 2))
        return state.proposed

    def learn(self, batch: Batch, draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        state = self._merging_state(batch)
        if batch.rows_apart:
            self._learn_apart(batch, state, draft, verdict)
        elif draft is state.proposed:
            for row, offers in zip(verdict.running, state.offered, strict=True):
                if row in verdict.rows:
                    found = verdict.rows[row]
                    state.trust(row).count(offers, Outcome(draft.tree, found.drafted, found.path))

    def _chains(self, batch: Batch, state: MergingState, budget: Budget) -> Draft:
        rows = [
            likeliest_path(state.trust(row).reach(offers), batch.budget_of(row, budget).depth)
            if row in batch.unfinished
            else ()
            for row, offers in zip(batch.running, state.offered, strict=True)
        ]
        return chains(batch, rows, match_length=2)

    def _learn_apart(self, batch: Batch, state: MergingState, draft: Draft, verdict: Verdict) -> None:
        """Learn of the rows that were given its chains, whatever others were given."""
        lengths = state.proposed.row_lengths if state.proposed is not None and draft.length else None
        for row, offers, length in zip(verdict.running, state.offered, lengths or (), strict=lengths is not None):
            if length and row in verdict.rows:
                found = verdict.rows[row]
                state.trust(row).count(offers, Outcome(Tree.chain(length), found.drafted, found.path[:length]))

    def _merging_state(self, batch: Batch) -> MergingState:
        state = self.state(batch)
        assert isinstance(state, MergingState)
        return state


def filled(batch: Batch, found: Merged) -> Tensor:
    """Return the tokens of merged nodes, `[rows, nodes]`: where a row has none, its last token again.

    Any guess is as exact as another.
    """
    last = batch.last_tokens[:, 0].tolist()
    tokens = [[token] * len(found.parents) for token in last]
    going = [index for index, row in enumerate(batch.running) if row in batch.unfinished]
    for index, row in zip(going, found.tokens, strict=True):
        tokens[index] = [last[index] if token is None else token for token in row]
    return torch.tensor(tokens, device=batch.last_tokens.device)


class MergingState(DraftState):
    """What such a drafter keeps during a generation.

    Args:
        rows_apart: see `Batch`.

    Attributes:
        proposed: its last draft, whether or not the round took it.
        offered: what that was made of, by running row.
    """

    def __init__(self, rows_apart: bool) -> None:
        self.rows_apart = rows_apart
        self._trust: defaultdict[int, Trust] = defaultdict(Trust)
        self.proposed: Draft | None = None
        self.offered: Sequence[tuple[Offer, ...]] = ()

    def trust(self, row: int) -> Trust:
        """Return the trust in what is offered to a row: its own where rows are apart, else that of all of them."""
        return self._trust[row if self.rows_apart else -1]
