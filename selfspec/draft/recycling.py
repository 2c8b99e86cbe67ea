"""Drafting from what earlier passes left over: their candidates for each token, grown into a tree for nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.cache.tree import Tree
from selfspec.draft.candidate_table import NONE, CandidateTable
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.draft_state import DraftState
from selfspec.draft.drafter import Drafter
from selfspec.draft.rank_chances import RankChances
from selfspec.draft.tree_shape import best_shape
from selfspec.errors import DraftConfigError
from selfspec.model.adapter import Adapter

if TYPE_CHECKING:
    from selfspec.decode.batch import Batch
    from selfspec.decode.verdict import Verdict

_MOST_CANDIDATES = 64
# What candidates of each rank were accepted at on the models measured, and how many places that counts for.
_CHANCES, _WEIGHT = (0.45, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01), 30.0


@dataclass(frozen=True)
class Recycling(Drafter):
    """Token Recycling (Luo et al., 2024, arXiv 2408.08696): drafts trees without a model and without training.

    A table holds, for each token, the candidates that followed it when the target last ran it, in whatever text and
    place, rejected nodes included. The draft is the tree that these candidates grow into from the last token. Nothing
    is drawn, so q is one-hot at each node. The table is the wrapper's: later generations draft from what earlier ones
    left. Under greedy decoding and under `coupled` that changes speed alone; sampled otherwise, a seed repeats its
    tokens with a new wrapper.

    Attributes:
        candidates: kept for each token, 1 to 64.
    """

    candidates: int = 8

    def __post_init__(self) -> None:
        if type(self.candidates) is not int or not 1 <= self.candidates <= _MOST_CANDIDATES:
            raise DraftConfigError(
                f"candidates must be an integer from 1 to {_MOST_CANDIDATES}, got {self.candidates!r}"
            )

    def check(self, depth: int) -> None:
        return

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        adapter.check_trees(model)

    def begin(self, batch: Batch) -> RecyclingMemory:
        memory = batch.memories.setdefault(self, RecyclingMemory(CandidateTable(self.candidates)))
        assert isinstance(memory, RecyclingMemory)
        for row in range(batch.size):
            memory.table.learn_text(list(batch.sequences.tokens_from(row, 0)))
        return memory

    def propose(self, batch: Batch, budget: Budget) -> Draft:
        memory = self.state(batch)
        assert isinstance(memory, RecyclingMemory)
        # Logits processors with memory judge chains alone.
        chances = memory.chances.rates()[: 1 if batch.sampling.in_order else None]
        tree = best_shape(chances, lambda nodes: batch.controller.round_cost(0, nodes), budget).tree
        last = batch.last_tokens[:, 0].cpu().numpy()
        unfinished = [index for index, row in enumerate(batch.running) if row in batch.unfinished]
        known = memory.table.after(last[unfinished], 0) != NONE
        if not len(tree) or not known.any() or not batch.controller.tries(match=1):
            return batch.no_draft()
        tokens = torch.from_numpy(memory.grown(last, tree)).to(batch.last_tokens.device)
        return Draft(tokens, tree, match_length=1)

    def learn(self, batch: Batch, draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        memory = self.state(batch)
        assert isinstance(memory, RecyclingMemory)
        tokens = torch.cat([batch.last_tokens, draft.tokens], 1).flatten().cpu().numpy()
        candidates = logits.flatten(0, 1).topk(min(self.candidates, logits.shape[-1])).indices.cpu().numpy()
        memory.table.learn(tokens, candidates)
        for row in verdict.rows.values():
            memory.chances.count(draft.tree, row.path)


class RecyclingMemory(DraftState):
    """What the drafter keeps as long as the wrapper: candidates, and how often those of each rank are accepted.

    Args:
        table: candidates of each token.
    """

    def __init__(self, table: CandidateTable) -> None:
        self.table = table
        self.chances = RankChances([*_CHANCES, *[0.005] * table.kept][: table.kept], _WEIGHT)

    def grown(self, last: NDArray[np.int64], tree: Tree) -> NDArray[np.int64]:
        """Return the token of each node, `[rows, nodes]`.

        Args:
            last: the last committed token of each row, `[rows]`.
            tree: siblings are the likeliest candidates of their place, in order.
        """
        tokens = np.empty((len(last), len(tree)), dtype=np.int64)
        for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
            before = last if parent < 0 else tokens[:, parent]
            found = self.table.after(before, rank)
            # Any guess is as exact as another.
            tokens[:, node] = np.where(found == NONE, before, found)
        return tokens
