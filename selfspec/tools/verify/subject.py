"""What is verified: one draft on one model, ready to generate."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from selfspec.api import SelfSpeculative, wrap
from selfspec.draft import Drafter
from selfspec.draft.named import draft_name
from selfspec.model.adapter import Adapter


@dataclass(frozen=True)
class Subject:
    """A draft on a model.

    Attributes:
        name: of the draft.
        drafter: what drafts; None for plain decoding.
        spec: generates with it.
    """

    name: str
    drafter: Drafter | None
    spec: SelfSpeculative

    @classmethod
    def of(cls, model: PreTrainedModel, adapter: Adapter, drafter: Drafter | None, draft_length: int) -> Subject:
        """Wrap a model.

        Raises:
            UnsupportedModelError, DraftConfigError: it cannot be wrapped so.
        """
        spec = wrap(model, draft=drafter, draft_length=draft_length, adapter=adapter)
        return cls(draft_name(drafter), drafter, spec)
