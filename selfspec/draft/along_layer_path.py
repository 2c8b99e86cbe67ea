"""Drafting along a cheap path of the model's own weights: the base of early exits and skip sets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.device import on_host
from selfspec.draft.draft import Budget, Draft, Resume
from selfspec.draft.drafter import MODEL, Drafter, OwnBytes
from selfspec.draft.rows_view import RowsView
from selfspec.draft.tree_growth import CHANCES, GrowingProposer, follow, grow
from selfspec.errors import DraftConfigError
from selfspec.model.early_head import DraftHead
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import LayerPath
from selfspec.model.sizes import cache_bytes_read, share_read
from selfspec.runtime.request import PassRequest


class LayerPathDrafter(Drafter):
    """Drafts with fewer of the target's layers, a step for each token or tree level; exact states become a `Resume`."""

    runs = "layers"

    @abstractmethod
    def path(self, depth: int) -> LayerPath:
        """Return the path in a network of `depth` layers; raise DraftConfigError if it does not fit."""

    @property
    def head(self) -> DraftHead | None:
        """Head that reads the path's last states, always the same object; None: the model's own norm and head."""
        return None

    @property
    def chances(self) -> Sequence[float]:
        """Prior acceptance rates of siblings by rank."""
        return CHANCES

    def runs_exact_layers(self, depth: int) -> bool:
        """Return whether the layers of a step compute the same as in the target."""
        return self.path(depth).window is None and (self.format is None or self.format.exact)

    def check(self, depth: int) -> None:
        self.path(depth)

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        return share_read(model, adapter, self.path(len(adapter.decoder_layers(model))), self.head)

    def cache_bytes_read(self, model: PreTrainedModel, adapter: Adapter, lengths: Sequence[int]) -> float:
        config, path = model.config.get_text_config(decoder=True), self.path(len(adapter.decoder_layers(model)))
        return cache_bytes_read(config, model.dtype, path, lengths)

    def begin(self, rows: RowsView) -> LayerPathProposer:
        return LayerPathProposer(self, rows.runner.depth)


@dataclass(frozen=True, eq=False)
class AroundLayerPath(LayerPathDrafter):
    """Runs another path drafter with one thing changed."""

    draft_with: LayerPathDrafter

    def __post_init__(self) -> None:
        if not isinstance(self.draft_with, LayerPathDrafter):
            raise DraftConfigError(f"{type(self).__name__} needs a drafter along a path, got {self.draft_with!r}")
        object.__setattr__(self, "format", self.draft_with.format)

    @property
    def chances(self) -> Sequence[float]:
        return self.draft_with.chances

    @property
    def head(self) -> DraftHead | None:
        return self.draft_with.head

    def mapped(self, change: Callable[[Drafter], Drafter]) -> Drafter:
        found = self.draft_with.mapped(change)
        assert isinstance(found, LayerPathDrafter)
        return replace(self, draft_with=found)

    def path(self, depth: int) -> LayerPath:
        return self.draft_with.path(depth)

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        return self.draft_with.own_bytes(model)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        self.draft_with.check_model(model, adapter)


class LayerPathProposer(GrowingProposer):
    """Runs the path of a `LayerPathDrafter` in a network of `depth` layers."""

    def __init__(self, drafter: LayerPathDrafter, depth: int) -> None:
        super().__init__(drafter.chances)
        self._path, self._head = drafter.path(depth), drafter.head

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        if not rows.controller.tries(MODEL):
            return rows.no_draft()
        states: list[ExactStates] = []

        def read(tokens: Tensor, first: int) -> Tensor:
            step = rows.runner.run(PassRequest(self._path, tokens, head=self._head, first=first))
            if step.states is not None:
                states.append(step.states)
            return step.logits

        tree, start = self.tree(rows, budget), self._path.resume_point
        # On a CPU no chain leaves states.
        chains = tree.is_chain and (start is None or not on_host(rows.last_tokens.device))
        draws, chain = rows.draws(tree.depth) if chains else None, None
        if draws is not None:
            rows.open_block(tree)
            chain = rows.runner.chain(PassRequest(self._path, rows.last_tokens, head=self._head), draws)
        draft = grow(rows, tree, read) if chain is None else follow(rows, chain, tree.depth, states)
        return draft if start is None else replace(draft, resume=Resume(start, ExactStates.concatenated(states)))
