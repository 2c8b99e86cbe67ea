"""Several modules for multi-token prediction, in order: the second drafts the second token, and so on.

Module j reads a token and the state that module j - 1 made of the token before it. So module j reads the nodes of a
draft from the root down to depth j - 1, and each module has keys and values of its own. Below the depth of the last
module, the last one reads its own states.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from selfspec.cache.tree import Tree
from selfspec.draft.heads.pairs import PairState
from selfspec.draft.rows_view import RowsView


class ModuleState(PairState):
    """Runs the passes of one module, which may begin a draft at nodes that the modules before it guessed."""

    # States read for the root and the nodes, if the module behind reads these too.
    _read: Tensor | None = None

    @property
    def passed_on(self) -> Tensor:
        """States of the root and of the nodes that the module behind it reads, `[rows, nodes, hidden]`."""
        passed = self._states if self.head.passes_on == "made" else self._read
        assert passed is not None
        return passed

    def after_text(self, view: RowsView, tree: Tree) -> Tensor:
        logits = super().after_text(view, tree)
        if self.following is not None and self.head.passes_on == "read":
            self._read = self._next_pairs(view, 1)[1]
        return logits

    def after_nodes(self, view: RowsView, before: ModuleState, tokens: Tensor, first: int) -> Tensor:
        """Read the nodes of a draft so far, and all committed tokens before them.

        Args:
            view: view of the target's rows.
            before: the module whose states it reads.
            tokens: tokens of the nodes, `[rows, nodes]`.
            first: number of the first node to return logits for.

        Returns:
            `[rows, nodes, vocab]`.
        """
        self._catch_up(view, 0)
        self._tree = before._tree
        root, states = self._next_pairs(view, 1)
        parents = [self._tree.parents[node] + 1 for node in range(tokens.shape[1])]
        self._read = torch.cat([states, before.passed_on[:, parents]], 1)
        inputs = self.head.fusion.inputs(self.head.embed(torch.cat([root, tokens], 1)), self._read)
        self._cache.open(self._tree)
        logits, self._states = self._run(inputs, first=-1)
        self._note_first_read()
        return self.head.spread(logits[:, first + 1 :], self._vocabulary)


class ModulesInOrder(ModuleState):
    """Runs the passes of the first of several modules, and the `further` passes of the modules behind it."""

    def __init__(self, *args: Any, further: Sequence[ModuleState]) -> None:
        super().__init__(*args)
        self._further = list(further)
        for module, following in pairwise(self._modules):
            module.following = following

    @property
    def _modules(self) -> list[ModuleState]:
        # An attribute would be a reference cycle.
        return [self, *self._further]

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(each.nbytes for each in self._further)

    @property
    def row_bytes(self) -> int:
        return super().row_bytes + sum(each.row_bytes for each in self._further)

    def _reaches(self, number: int) -> bool:
        # The last module reads a state that each module before it made from one token earlier.
        known = self._cache.seq_lens[number] + self._count(number)
        return super()._reaches(number) and known > len(self._further)

    def read_if_many(self, view: RowsView) -> None:
        super().read_if_many(view)
        for each in self._further:
            each.read_if_many(view)

    def after_text(self, view: RowsView, tree: Tree) -> Tensor:
        logits = super().after_text(view, tree)
        self._tokens = view.last_tokens[:, :0]
        return logits

    def after(self, view: RowsView, tokens: Tensor, first: int) -> Tensor:
        self._tokens = torch.cat([self._tokens, tokens], 1)
        depth, modules = self._tree.depths[first], self._modules
        if depth < len(modules):
            return modules[depth].after_nodes(view, modules[depth - 1], self._tokens, first)
        return modules[-1].after(view, tokens, first)

    def hold(self, rows: int, tokens: int) -> None:
        super().hold(rows, tokens)
        for each in self._further:
            each.hold(rows, tokens)

    def join(self, other: PairState) -> None:
        assert isinstance(other, ModulesInOrder)
        super().join(other)
        for each, joined in zip(self._further, other._further, strict=True):
            each.join(joined)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        for each in self._further:
            each.select(rows)
