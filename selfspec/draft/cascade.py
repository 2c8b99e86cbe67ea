"""Several drafters under one verifier: what costs nothing where that promises more, else what runs a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.assistant import Assistant
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import Drafter, Exit
from selfspec.draft.prompt_lookup import PromptLookup
from selfspec.draft.recycling import CANDIDATES, Recycling
from selfspec.draft.rows_apart import filled_up
from selfspec.draft.suffixes import Suffixes
from selfspec.errors import DraftConfigError
from selfspec.model.adapter import Adapter
from selfspec.model.substitutes import Substitutes

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec.decode.batch import Batch
    from selfspec.decode.verdict import Verdict

Free = PromptLookup | Suffixes | Recycling
"""What drafts without a model, and may come before other drafters."""

_IN_ORDER = ([PromptLookup], [Suffixes], [Recycling], [PromptLookup, Recycling], [Suffixes, Recycling])


@dataclass(frozen=True)
class Cascade(Drafter):
    """Takes the draft of a source without a model where it has one that promises more than the sources behind it.

    Which of them a round takes is the control's choice: by what rounds with so long a match, with recycled candidates,
    and with drafts of a model have lately committed for what they cost. All of them learn from every round. Where rows
    are apart (see `FixedLength`) each row takes the first that has one for it.

    Attributes:
        first: looks up, draws suffix trees, or recycles.
        then: recycles behind a look-up, drafts along a path of the model or with an assistant, or is one more cascade.
    """

    first: Free
    then: Drafter

    def __post_init__(self) -> None:
        *before, last = self.sources
        free = [type(source) for source in self.sources if isinstance(source, Free)]
        if (
            not all(isinstance(source, Free) for source in before)
            or not isinstance(last, LayerPathDrafter | Assistant | Recycling)
            or free not in _IN_ORDER
        ):
            raise DraftConfigError(
                "a cascade is a look-up or suffix trees, recycling, or both in this order, and then a drafter along a "
                "path of the model or an assistant, e.g. 'lookup+exit:4', 'lookup+recycle', 'suffix+recycle+int8' "
                f"or Cascade(PromptLookup(), EarlyExit(layer=4)); got {self.first!r} and {self.then!r}"
            )

    @property
    def sources(self) -> tuple[Drafter, ...]:
        """All drafters, in the order in which they are asked."""
        return (self.first, *(self.then.sources if isinstance(self.then, Cascade) else (self.then,)))

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
        self.then.prepare(model, substitutes)

    def leaves_at(self, depth: int) -> Exit | None:
        return self.then.leaves_at(depth)

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        return self.then.cost(model, adapter)

    def begin(self, batch: Batch) -> None:
        for source in self.sources:
            source.state(batch)

    def propose(self, batch: Batch, budget: Budget) -> Draft:
        found, control = self.first.look_up(batch, budget), batch.controller
        if batch.rows_apart:
            return filled_up(batch, found, lambda: self.then.propose(batch, budget))
        behind = [CANDIDATES if isinstance(source, Recycling) else 0 for source in self.sources[1:]]
        if found.length and control.prefers(found.match_length, behind) and control.tries(found.match_length):
            return found
        return self.then.propose(batch, budget)

    def learn(self, batch: Batch, draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        for source in self.sources:
            source.learn(batch, draft, logits, verdict)
