"""What a drafter is: it turns the state of a generation into a Draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from selfspec.draft.draft import Budget, Draft
from selfspec.draft.draft_state import DraftState
from selfspec.model.adapter import Adapter
from selfspec.model.early_head import DraftHead
from selfspec.model.substitutes import Substitutes

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec.decode.batch import Batch
    from selfspec.decode.verdict import Verdict


@dataclass(frozen=True)
class Exit:
    """Where a draft leaves the network: all it computes is what the target computes first.

    Attributes:
        layer: the first layer left out.
        head: what reads the states there; None: the model's own norm and head.
    """

    layer: int
    head: DraftHead | None


class Drafter(ABC):
    """Proposes tokens. A drafter is configuration only: it holds nothing of a model or of a generation."""

    @abstractmethod
    def check(self, depth: int) -> None:
        """Refuse a network of `depth` layers that this drafter does not fit.

        Raises:
            DraftConfigError: naming what is out of range.
        """

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:  # noqa: B027 - some fit every model
        """Refuse a model that this drafter was not made for. Asked once, when the model is wrapped.

        Raises:
            SelfSpecError: naming what does not fit.
        """

    def prepare(self, model: PreTrainedModel, substitutes: Substitutes) -> None:  # noqa: B027 - most have no files
        """Read substitutes that the drafter has in a file. Asked when the model is wrapped, and when it was moved.

        Raises:
            SelfSpecError: the file cannot be used, or is another model's.
        """

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        """The draft cost ratio c, estimated: a draft step's cost in steps of plain decoding. 0: it runs no model."""
        return 0.0

    def leaves_at(self, depth: int) -> Exit | None:
        """Where the drafter leaves a network of `depth` layers early, between two of them; None: it does not."""
        return None

    def begin(self, batch: Batch) -> DraftState | None:
        """Make what the drafter keeps during one generation, before any pass; `state` returns it. None: nothing.

        Raises:
            SelfSpecError: the drafter cannot draft for these prompts.
        """
        return None

    def state(self, batch: Batch) -> DraftState | None:
        """Return what the drafter keeps during this generation: what `begin` made when this was first asked."""
        if id(self) not in batch.draft_states:
            batch.draft_states[id(self)] = self.begin(batch)
        return batch.draft_states[id(self)]

    def check_joining(self) -> None:  # noqa: B027 - most can
        """Refuse to draft for rows that join a running batch and leave it.

        Raises:
            DraftConfigError: what it keeps belongs to the batch as a whole.
        """

    def learn(self, batch: Batch, draft: Draft, logits: Tensor, verdict: Verdict) -> None:  # noqa: B027 - most do not
        """Learn from a round, before it is committed.

        Args:
            batch: before the round is committed.
            draft: of the round, by whatever source.
            logits: the target's own, `[rows, nodes + 1, vocab]`.
            verdict: on the draft.
        """

    @abstractmethod
    def propose(self, batch: Batch, budget: Budget) -> Draft:
        """Propose tokens for each row, a tree of the same shape for all, or none if the controller advises against it.

        Leaves the cursors of the cache where they were.

        Args:
            batch: before the round.
            budget: the most that the draft may take, a depth of at least 1.
        """
