"""Several sources in one tree: what costs nothing, beside what a model drew."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.cache.tree import Tree
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import Drafter, Exit
from selfspec.draft.growing import GrowingDrafter
from selfspec.draft.merging import MergingDrafter, MergingState, filled
from selfspec.draft.offer import Offer, Outcome, Path, merged
from selfspec.draft.recycling import Recycling
from selfspec.draft.rows_apart import filled_up
from selfspec.draft.suffixes import Suffixes
from selfspec.errors import DraftConfigError
from selfspec.model.adapter import Adapter
from selfspec.model.substitutes import Substitutes

if TYPE_CHECKING:
    from selfspec.decode.batch import Batch
    from selfspec.decode.verdict import Verdict

# In trust: nodes beside a model's.
_BESIDE = "beside"
# Tokens that a round with the model's draft is held to commit at first, and how many rounds that counts for.
_COMMITS, _ROUNDS = 2.0, 4.0


@dataclass(frozen=True, init=False)
class Union(MergingDrafter):
    """Merges what suffix trees and recycling know into one tree, and puts it beside what a model draws.

    A round takes the tree of the sources without a model where that promises more than the model's draft. Else the
    model drafts a chain, and where they differ from it the likeliest other tokens are judged after its own. These were
    not drawn, so their q is one-hot, whatever the model drew before them; the rules are exact for such siblings.

    How often the nodes of each source are accepted is learnt apart, and apart beside a model.

    Where rows are apart (see `FixedLength`) each has a chain: of the sources without a model if they know of one, else
    the model's.

    Attributes:
        free: sources without a model: suffix trees, recycling, or both.
        then: drafts with a model; None: none does.
    """

    free: tuple[Suffixes | Recycling, ...]
    then: GrowingDrafter | None

    def __init__(self, *sources: Drafter) -> None:
        """Take the sources, that with a model last.

        Raises:
            DraftConfigError: none is without a model, one comes twice, or they are others.
        """
        free = tuple(source for source in sources if isinstance(source, Suffixes | Recycling))
        others = [source for source in sources if not isinstance(source, Suffixes | Recycling)]
        kinds = {type(source) for source in free}
        if (
            not free
            or len(kinds) < len(free)
            or sources != (*free, *others)
            or len(others) > 1
            or not all(isinstance(other, GrowingDrafter) for other in others)
        ):
            raise DraftConfigError(
                "a union is of suffix trees, recycling, or both, and then at most one drafter along a path of the "
                "model or assistant, e.g. 'union:suffix+recycle+exit:4' or Union(Suffixes(), EarlyExit(layer=4)); got "
                f"{list(sources)!r}"
            )
        object.__setattr__(self, "free", free)
        object.__setattr__(self, "then", others[0] if others else None)

    @property
    def sources(self) -> tuple[Drafter, ...]:
        """All drafters."""
        return self.free if self.then is None else (*self.free, self.then)

    def check(self, depth: int) -> None:
        for source in self.sources:
            source.check(depth)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        for source in self.sources:
            source.check_model(model, adapter)

    def check_joining(self) -> None:
        for source in self.sources:
            source.check_joining()

    def prepare(self, model: PreTrainedModel, substitutes: Substitutes) -> None:
        for source in self.sources:
            source.prepare(model, substitutes)

    def leaves_at(self, depth: int) -> Exit | None:
        return None if self.then is None else self.then.leaves_at(depth)

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        return 0.0 if self.then is None else self.then.cost(model, adapter)

    def begin(self, batch: Batch) -> UnionState:
        for source in self.sources:
            source.state(batch)
        return UnionState(batch.rows_apart)

    def offers(self, batch: Batch, budget: Budget) -> list[tuple[Offer, ...]]:
        each = [source.offers(batch, budget) for source in self.free]
        return [tuple(chain.from_iterable(offers)) for offers in zip(*each, strict=True)]

    def propose(self, batch: Batch, budget: Budget) -> Draft:
        if self.then is None:
            return super().propose(batch, budget)
        found, control, then = self.look_up(batch, budget), batch.controller, self.then
        if batch.rows_apart:
            return filled_up(batch, found, lambda: then.propose(batch, Budget.chain(budget.depth)))
        if found.length and control.prefers(found.match_length, [0]) and control.tries(found.match_length):
            return found
        drawn = then.propose(batch, Budget.chain(budget.depth))
        # Logits processors with memory judge chains alone.
        return drawn if batch.sampling.in_order or not drawn.length else self._beside(batch, budget, drawn)

    def learn(self, batch: Batch, draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        super().learn(batch, draft, logits, verdict)
        for source in self.free:
            source.learn(batch, draft, logits, verdict)
        state = self._union_state(batch)
        if draft.steps and verdict.rows:
            lengths = [len(row.path) for row in verdict.rows.values()]
            state.learn_length(1 + sum(lengths) / len(lengths))
        if draft is state.joined:
            for number, offers in zip(verdict.running, state.offered, strict=True):
                if number in verdict.rows:
                    row = verdict.rows[number]
                    state.trust(number).count(offers, Outcome(draft.tree, row.drafted, row.path, state.drawn), _BESIDE)

    def _beside(self, batch: Batch, budget: Budget, drawn: Draft) -> Draft:
        """Put what the other sources offer beside a draft."""
        state, nodes = self._union_state(batch), len(drawn.tree)
        going = [index for index, row in enumerate(batch.running) if row in batch.unfinished]
        reach = [state.trust(batch.running[index]).reach(state.offered[index], _BESIDE) for index in going]
        tokens = drawn.tokens.tolist()

        def path_of(row: int, node: int) -> Path:
            return tuple(tokens[row][each] for each in drawn.tree.paths[node])

        def promise(more: int, committed: float) -> float:
            return (state.length + committed) / batch.controller.round_cost(drawn.steps, nodes + more)

        under = [{path_of(index, node): node for node in range(nodes)} for index in going]
        found = merged(reach, Budget(budget.depth, budget.nodes - nodes), promise, branches=True, under=under)
        if not found.parents:
            return drawn
        others = filled(batch, found)
        probs = drawn.probs
        if probs is not None:
            q = probs.new_zeros(*others.shape, probs.shape[-1]).scatter_(-1, others[..., None], 1.0)
            probs = torch.cat([probs, q], 1)
        tree = Tree((*drawn.tree.parents, *found.parents))
        state.joined = replace(drawn, tokens=torch.cat([drawn.tokens, others], 1), tree=tree, probs=probs)
        state.drawn = nodes
        return state.joined

    def _union_state(self, batch: Batch) -> UnionState:
        state = self.state(batch)
        assert isinstance(state, UnionState)
        return state


class UnionState(MergingState):
    """What the drafter keeps during a generation.

    Args:
        rows_apart: see `Batch`.

    Attributes:
        length: tokens that rounds with the model's draft commit, a mean over recent ones.
        joined: the last draft of a model that others were put beside.
        drawn: how many of its nodes are the model's.
    """

    def __init__(self, rows_apart: bool) -> None:
        super().__init__(rows_apart)
        self.length = _COMMITS
        self.joined: Draft | None = None
        self.drawn = 0

    def learn_length(self, tokens: float) -> None:
        """Count a round with the model's draft."""
        self.length += (tokens - self.length) / (_ROUNDS + 1)
