"""Draft with states of the target: what each row's draft begins from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.tree import Tree
from selfspec.draft.draft import Budget, Draft, Verdict
from selfspec.draft.drafter import MODEL, Drafter
from selfspec.draft.rows_view import RowsView, remembered
from selfspec.draft.tree_growth import GrowingProposer, Read, grow
from selfspec.model.features import Features
from selfspec.model.sizes import bytes_read
from selfspec.runtime.request import PassResult

_Made = TypeVar("_Made")


class FeatureProposer(GrowingProposer):
    """Grows drafts from states of the target. A prompt of one token has no such state before the first round."""

    @abstractmethod
    def add(self, rows: RowsView, features: Features, places: Sequence[Sequence[int]]) -> None:
        """Take over the target's states at `places` of a pass, for each running row; embeddings have no `features`."""

    @abstractmethod
    def known(self, rows: RowsView) -> Sequence[bool]:
        """Return, for each running row, whether it has a state to draft from."""

    @abstractmethod
    def reader(self, rows: RowsView, tree: Tree) -> Read:
        """Return the function that reads the nodes of a draft: see `grow`."""

    def read_prompt(self, rows: RowsView, counts: Sequence[int], features: Features) -> None:
        self.add(rows, features, [range(count) for count in counts])

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        super().learn(rows, draft, target, verdict)
        self.add(rows, target.features, committed_places(rows, verdict))

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        known = self.known(rows)
        if not any(known) or not rows.controller.tries(MODEL):
            return rows.no_draft()
        tree = self.tree(rows, budget if all(known) else Budget.chain(budget.depth))
        draft = grow(rows, tree, self.reader(rows, tree))
        if all(known):
            return draft
        return replace(draft, row_lengths=tuple(draft.length if each else 0 for each in known))


class KeepingProposer(FeatureProposer):
    """Grows drafts from a `kept` tensor of each row: by default the target's state before the last token."""

    def __init__(self, rows: int, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.kept: list[Tensor | None] = [None] * rows
        self._weights = sum(weight.nbytes for module in modules for weight in module.parameters())

    @property
    def nbytes(self) -> int:
        return self._weights + self.row_bytes

    def add(self, rows: RowsView, features: Features, places: Sequence[Sequence[int]]) -> None:
        states = features.get("normed")
        for number, (row, chosen) in enumerate(zip(rows.running, places, strict=True)):
            if chosen and states is not None:
                self.kept[row] = states[number, chosen[-1]].clone()

    def known(self, rows: RowsView) -> Sequence[bool]:
        return [self.kept[row] is not None for row in rows.running]

    def stacked(self, rows: RowsView) -> Tensor:
        """Return the kept tensors of the running rows, `[rows, ...]`; zeros for rows without one."""
        some = next(kept for kept in self.kept if kept is not None)
        kept = (self.kept[row] for row in rows.running)
        return torch.stack([torch.zeros_like(some) if each is None else each for each in kept])

    def join(self, other: KeepingProposer) -> None:
        self.kept += other.kept

    def select(self, rows: Sequence[int]) -> None:
        self.kept = [self.kept[row] for row in rows]


def of_levels(tree: Tree, logits: Callable[[int], Tensor]) -> Read:
    """Return a draft step whose logits, `[rows, 1, vocab]`, depend on the level of the nodes that it reads alone."""

    def read(tokens: Tensor, first: int) -> Tensor:
        return logits(0 if first < 0 else tree.depths[first]).expand(-1, tokens.shape[1], -1)

    return read


def made_once(rows: RowsView, drafter: Drafter, made: Callable[[PreTrainedModel], _Made]) -> _Made:
    """Return `made(model)`, made once for each drafter, device and dtype of the model."""
    model = rows.runner.model
    return remembered(rows, (drafter, model.device, model.dtype), partial(made, model))


def committed_places(rows: RowsView, verdict: Verdict) -> list[Sequence[int]]:
    """Return the places of each running row's committed tokens in the pass; the last new token has none yet."""
    found = [verdict.rows.get(row) for row in rows.running]
    return [() if row is None else [node + 1 for node in (-1, *row.path)][: len(row.tokens)] for row in found]


def share_of(nbytes: float, model: PreTrainedModel, adapter: Adapter) -> float:
    """Return the draft cost ratio c of a head that reads `nbytes` bytes in each step."""
    return nbytes / bytes_read(model, adapter)
