"""Which draft serves a request: one for all, or one for greedy decoding and another for sampling.

How long drafts are is the control's choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from selfspec.control import Control, CostAware
from selfspec.control.costs import CostsByRows
from selfspec.draft import Drafter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfspec.model.adapter import Adapter


@dataclass(frozen=True)
class DraftChoice:
    """What drafts in a generation.

    Attributes:
        draft: proposes tokens; None: plain decoding.
        control: how long drafts are, where nobody says otherwise.
        costs: of a round that drafts, measured; None: nobody measured them.
        most_rows: of a batch that it drafts in; larger ones are decoded plainly. None: it drafts in any.
    """

    draft: Drafter | None
    control: Control = field(default_factory=CostAware)
    costs: CostsByRows | None = None
    most_rows: int | None = None

    def in_batch(self, rows: int) -> DraftChoice:
        """What drafts in a batch.

        Args:
            rows: of it, at least 1.
        """
        return self if self.most_rows is None or rows <= self.most_rows else DraftChoice(None)


class DraftPolicy(ABC):
    """Chooses the drafter of a request. It is configuration, as drafters are."""

    @abstractmethod
    def choose_draft(self, greedy: bool) -> DraftChoice:
        """What drafts in a generation.

        Args:
            greedy: whether it decodes greedily; else it samples.
        """

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:  # noqa: B027 - some fit every model
        """Refuse a model that the plan was not made for. Asked once, when the model is wrapped.

        Raises:
            SelfSpecError: naming what does not fit.
        """


@dataclass(frozen=True)
class Always(DraftPolicy):
    """The same draft for every request.

    Attributes:
        draft: proposes tokens; None: plain decoding.
    """

    draft: Drafter | None

    def choose_draft(self, greedy: bool) -> DraftChoice:
        return DraftChoice(self.draft)
