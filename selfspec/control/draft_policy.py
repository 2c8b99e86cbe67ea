"""Draft policies choose the draft of a request, for greedy decoding or sampling; controls choose its length."""

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
    """Says which draft serves a generation, and with which control and costs.

    Attributes:
        draft: proposes tokens; None: plain decoding.
        control: default choice of draft lengths.
        costs: measured costs of a round that drafts; None: not measured.
        most_rows: the most rows of a batch that drafts; larger batches use plain decoding. None: any number.
    """

    draft: Drafter | None
    control: Control = field(default_factory=CostAware)
    costs: CostsByRows | None = None
    most_rows: int | None = None

    def in_batch(self, rows: int) -> DraftChoice:
        """Return the choice for a batch of `rows` rows."""
        return self if self.most_rows is None or rows <= self.most_rows else DraftChoice(None)


class DraftPolicy(ABC):
    """Chooses the drafter of a request. Like drafters, it is configuration."""

    @abstractmethod
    def choose_draft(self, greedy: bool) -> DraftChoice:
        """Choose the draft of a generation that decodes greedily, or samples."""

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:  # noqa: B027 - some fit every model
        """Refuse a model that the policy was not made for. Called once, when the model is wrapped.

        Raises:
            SelfSpecError: naming what does not fit.
        """
