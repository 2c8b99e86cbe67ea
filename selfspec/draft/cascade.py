"""Two drafters under one verifier: look up where that promises more, else draft with a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.assistant import Assistant
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import Drafter, Exit
from selfspec.draft.prompt_lookup import PromptLookup
from selfspec.errors import DraftConfigError
from selfspec.model.adapter import Adapter
from selfspec.model.substitutes import Substitutes

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec.decode.batch import Batch
    from selfspec.decode.verdict import Verdict


@dataclass(frozen=True)
class Cascade(Drafter):
    """Looks up first, and drafts with a model where there is no match, or none worth following.

    Which of the two a round takes is the control's choice: by what rounds with so long a match, and rounds that drafted
    with the model, have lately committed for what they cost.

    Attributes:
        look_up: copies from prompt and output.
        path: drafts along a path of the model, or with an assistant.
    """

    look_up: PromptLookup
    path: LayerPathDrafter | Assistant

    def __post_init__(self) -> None:
        if not isinstance(self.look_up, PromptLookup) or not isinstance(self.path, LayerPathDrafter | Assistant):
            raise DraftConfigError(
                "a cascade is a look-up and a drafter along a path of the model, or an assistant, e.g. "
                f"Cascade(PromptLookup(), EarlyExit(layer=4)); got {self.look_up!r} and {self.path!r}"
            )

    def check(self, depth: int) -> None:
        self.path.check(depth)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        self.path.check_model(model, adapter)

    def prepare(self, model: PreTrainedModel, substitutes: Substitutes) -> None:
        self.path.prepare(model, substitutes)

    def leaves_at(self, depth: int) -> Exit | None:
        return self.path.leaves_at(depth)

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        return self.path.cost(model, adapter)

    def begin(self, batch: Batch) -> None:
        self.path.state(batch)

    def propose(self, batch: Batch, budget: Budget) -> Draft:
        found = self.look_up.look_up(batch, budget)
        if found.length and batch.controller.prefers(found.match_length) and batch.controller.tries(found.match_length):
            return found
        return self.path.propose(batch, budget)

    def learn(self, batch: Batch, draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        self.path.learn(batch, draft, logits, verdict)
