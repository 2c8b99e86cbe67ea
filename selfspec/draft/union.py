"""Several sources in one tree: offers of sources without a model, beside the draft of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.tree import Tree
from selfspec.draft.cascade import JoinedDrafter, JoinedProposer, joined_spelling
from selfspec.draft.declaration import drafter
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import MODEL, Proposer
from selfspec.draft.merging import MergingProposer, filled
from selfspec.draft.offer import Offer, Outcome, Path, merged
from selfspec.draft.rows_apart import filled_up
from selfspec.draft.rows_view import RowsView
from selfspec.draft.verdict import Verdict
from selfspec.runtime.runner import PassResult

# The place, in `Trust`, of nodes beside a model's.
_BESIDE = "beside"
# Tokens that a round with the model's draft is assumed to commit at first, and how many rounds that counts for.
_COMMITS, _ROUNDS = 2.0, 4.0


@drafter(
    "union",
    argument=":DRAFT+DRAFT",
    written="before",
    example="union:suffix+recycle+exit:4",
    help="drafts without a model in one tree, beside what one with a model drew",
)
@dataclass(frozen=True, init=False)
class Union(JoinedDrafter):
    """Merges the offers of sources without a model into one tree, and puts them beside the draft of a model.

    A round takes the tree of the sources without a model if it promises more than the model's draft. Else the model
    drafts a chain, and the likeliest offered tokens that differ from it are judged after its own. They are not drawn,
    so their q is one-hot, whatever the model drew before them; the rules are exact for such siblings. Rows in lockstep
    get the chain alone.

    The acceptance rates of each source are learnt separately, and separately again for nodes beside a model's.

    Where rows are apart (see `FixedLength`), each has a chain: of the sources without a model if they offer one, else
    the model's. The source that runs a model, if any, is asked last.
    """

    @property
    def spelling(self) -> str | None:
        names = joined_spelling(self.sources)
        return None if names is None else f"union:{names}"

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        adapter.check_trees(model)
        super().check_model(model, adapter)

    def begin(self, rows: RowsView) -> Proposer:
        free = [source.begin(rows) for source in self.sources if source.runs == "nothing"]
        drawn = [source.begin(rows) for source in self.sources if source.runs != "nothing"]
        merging = FreeUnionProposer(rows, free)
        return UnionProposer(merging, drawn[0]) if drawn else merging


class FreeUnionProposer(MergingProposer, JoinedProposer):
    """Merges the offers of several sources without a model."""

    def __init__(self, rows: RowsView, sources: Sequence[Proposer]) -> None:
        MergingProposer.__init__(self, rows)
        JoinedProposer.__init__(self, sources)

    def offers(self, rows: RowsView, budget: Budget) -> list[tuple[Offer, ...]]:
        each = [source.offers(rows, budget) for source in self.sources]
        return [tuple(chain.from_iterable(offers)) for offers in zip(*each, strict=True)]

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        MergingProposer.learn(self, rows, draft, target, verdict)
        JoinedProposer.learn(self, rows, draft, target, verdict)


class UnionProposer(JoinedProposer):
    """Puts the offers of sources without a model beside the draft of a source with a model."""

    def __init__(self, free: FreeUnionProposer, drawn: Proposer) -> None:
        super().__init__([free, drawn])
        self._free = free
        self._drawn = drawn
        # Mean number of tokens that recent rounds with the model's draft committed.
        self._length = _COMMITS
        # The model's last draft with offers beside it, and how many of its nodes are the model's.
        self._joined: Draft | None = None
        self._nodes = 0

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        found, control = self._free.look_up(rows, budget), rows.controller
        if rows.rows_apart:
            without_branches = replace(budget, nodes=budget.depth)
            return filled_up(rows, found, without_branches, lambda rest: self._drawn.propose(rows, rest))
        if found.length and control.prefers(found.match_length, [MODEL]) and control.tries(found.match_length):
            return found
        drawn = self._drawn.propose(rows, Budget.chain(budget.depth))
        # The nodes beside a chain depend on all of its tokens.
        alone = rows.chains_only or rows.in_lockstep
        return drawn if alone or not drawn.length else self._beside(rows, budget, drawn)

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        super().learn(rows, draft, target, verdict)
        if draft.steps and verdict.rows:
            lengths = [len(row.path) for row in verdict.rows.values()]
            self._length += (1 + sum(lengths) / len(lengths) - self._length) / (_ROUNDS + 1)
        if draft is self._joined:
            for number, offers in zip(verdict.running, self._free.offered, strict=True):
                if number in verdict.rows:
                    row = verdict.rows[number]
                    outcome = Outcome(draft.tree, row.drafted, row.path, self._nodes)
                    self._free.trust(number).count(offers, outcome, _BESIDE)

    def _beside(self, rows: RowsView, budget: Budget, drawn: Draft) -> Draft:
        nodes = len(drawn.tree)
        going = [index for index, row in enumerate(rows.running) if row in rows.unfinished]
        reach = [self._free.trust(rows.running[index]).reach(self._free.offered[index], _BESIDE) for index in going]
        drew = drawn.tokens.tolist()

        def path_of(row: int, node: int) -> Path:
            return tuple(drew[row][each] for each in drawn.tree.paths[node])

        def promise(more: int, committed: float) -> float:
            return (self._length + committed) / rows.controller.round_cost(drawn.steps, nodes + more)

        under = [{path_of(index, node): node for node in range(nodes)} for index in going]
        found = merged(reach, Budget(budget.depth, budget.nodes - nodes), promise, branches=True, under=under)
        if not found.parents:
            return drawn
        others = filled(rows, found)
        probs = drawn.probs
        if probs is not None:
            q = probs.new_zeros(*others.shape, probs.shape[-1]).scatter_(-1, others[..., None], 1.0)
            probs = torch.cat([probs, q], 1)
        tree = Tree((*drawn.tree.parents, *found.parents))
        tokens = torch.cat([drawn.tokens, others], 1)
        self._joined = replace(drawn, tokens=tokens, tree=tree, probs=probs, behind=drawn.behind_any_tree)
        self._nodes = nodes
        return self._joined
