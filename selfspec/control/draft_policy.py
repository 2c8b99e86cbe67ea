"""Which draft serves a request: one for all, or one for greedy decoding and another for sampling.

How long drafts are is the control's choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.control import Control, CostAware
from selfspec.control.costs import CostsByRows
from selfspec.draft import Drafter


@dataclass(frozen=True)
class DraftChoice:
    """What drafts in a generation.

    Attributes:
        draft: proposes tokens; None: plain decoding.
        control: how long drafts are, where nobody says otherwise.
        costs: of a round that drafts, measured; None: nobody measured them.
        most_rows: of a batch that it drafts in; larger ones use plain decoding. None: it drafts in any.
    """

    draft: Drafter | None
    control: Control = field(default_factory=CostAware)
    costs: CostsByRows | None = None
    most_rows: int | None = None

    def in_batch(self, rows: int) -> DraftChoice:
        """What drafts in a batch of `rows` rows."""
        return self if self.most_rows is None or rows <= self.most_rows else DraftChoice(None)


class DraftPolicy(ABC):
    """Chooses the drafter of a request. It is configuration, as drafters are."""

    @abstractmethod
    def choose_draft(self, greedy: bool) -> DraftChoice:
        """What drafts in a generation that decodes greedily, or samples."""

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:  # noqa: B027 - some fit every model
        """Refuse a model that the plan was not made for. Asked once, when the model is wrapped.

        Raises:
            SelfSpecError: naming what does not fit.
        """
