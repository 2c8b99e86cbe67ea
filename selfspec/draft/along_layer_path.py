"""Drafting along a cheap path of the model's own weights: what early exits and skip sets have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.draft.draft import Budget, Draft, Resume
from selfspec.draft.drafter import Exit
from selfspec.draft.growing import GrowingDrafter
from selfspec.draft.tree_growth import grow
from selfspec.model.adapter import Adapter
from selfspec.model.early_head import DraftHead
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import LayerPath, Part
from selfspec.model.weights_read import share_read

if TYPE_CHECKING:
    from selfspec.decode.batch import Batch


class LayerPathDrafter(GrowingDrafter):
    """Drafts with the target's own layers, fewer of them: one step of the path for each token, or each level of a tree.

    What the path computes before its first missing
    sublayer is exact; it stays in the shared cache and goes to the target as `Resume`.
    """

    @abstractmethod
    def path(self, depth: int) -> LayerPath:
        """The path of a draft step in a network of `depth` layers.

        Raises:
            DraftConfigError: the path does not fit the network.
        """

    @property
    def head(self) -> DraftHead | None:
        """What reads the path's last states; the same object every time. None: the model's own norm and head."""
        return None

    def check(self, depth: int) -> None:
        self.path(depth)

    def leaves_at(self, depth: int) -> Exit | None:
        path = self.path(depth)
        start = path.resume_point
        if start is None or start.part is not Part.ATTENTION or path != LayerPath.up_to(depth, start):
            return None
        return Exit(start.layer, self.head)

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        return share_read(model, adapter, self.path(len(adapter.decoder_layers(model))), self.head)

    def propose(self, batch: Batch, budget: Budget) -> Draft:
        if not batch.controller.tries(match=0):
            return batch.no_draft()
        path = self.path(batch.runner.depth)
        states: list[ExactStates] = []

        def read(tokens: Tensor, first: int) -> Tensor:
            step = batch.runner.logits(path, tokens, head=self.head, first=first)
            if step.states is not None:
                states.append(step.states)
            return step.logits

        draft = grow(batch, self.tree(batch, budget), read)
        start = path.resume_point
        return draft if start is None else replace(draft, resume=Resume(start, ExactStates.concatenated(states)))
