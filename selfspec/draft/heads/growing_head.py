"""Draft with a head that reads its own states again for each further token, such as EAGLE and MTP."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.tree import Tree
from selfspec.draft.draft import Budget, Draft, Verdict
from selfspec.draft.drafter import MODEL, Drafter
from selfspec.draft.heads.head import Head, own_bytes
from selfspec.draft.heads.pairs import PairState
from selfspec.draft.rows_view import RowsView, own_programs
from selfspec.draft.tree_growth import GrowingProposer, Read, grow
from selfspec.errors import UnsupportedOptionError
from selfspec.formats.format import Format
from selfspec.model.early_head import plain_head
from selfspec.model.features import Features, Point
from selfspec.model.sizes import bytes_read
from selfspec.model.substitutes import Substitutes
from selfspec.runtime.recorded import runner_for
from selfspec.runtime.request import PassResult

_Made = TypeVar("_Made")


class HeadDrafter(Drafter):
    """Drafts with a head that was trained on states of one target, for that target alone."""

    runs = "model"
    weight_format: Format | None = None
    """Bits of its linear layers; None: they have the dtype of the target."""
    passes: ClassVar[type[PairState]] = PairState
    """Class of its passes, which read the committed text."""

    @property
    def block(self) -> int:
        """Number of tokens that each of its drafts reads behind the last committed one; 0: the budget decides."""
        return 0

    @abstractmethod
    def points(self, depth: int) -> tuple[Point, ...]:
        """Return the points of a target of `depth` layers whose states it reads, in the order of `Fusion.state`."""

    def read_points(self, model: PreTrainedModel, depth: int) -> tuple[Point, ...]:
        """Return these points for one model; by default they do not depend on it."""
        return self.points(depth)

    @abstractmethod
    def head(self, model: PreTrainedModel) -> Head:
        """Make the head over a target, in its dtype and on its device. Raises `HeadError` for files of another."""

    def heads(self, model: PreTrainedModel) -> Sequence[Head]:
        """Make all heads over a target, in their order: see `head`. Most drafters have one."""
        return [self.head(model)]

    def made(self, model: PreTrainedModel) -> Sequence[Head]:
        """Make these heads in `weight_format`."""
        heads = self.heads(model)
        if self.weight_format is None:
            return heads
        substitutes = Substitutes(f"layers.{plain_head(heads[0].layers)}")
        return [head.packed(self.weight_format, substitutes) for head in heads]

    def features(self, depth: int) -> tuple[Point, ...]:
        return tuple(dict.fromkeys(self.points(depth)))

    def begin(self, rows: RowsView) -> HeadProposer:
        if not rows.are_text:
            raise UnsupportedOptionError(
                "a draft head reads token ids, and these prompts have embeddings, a soft prompt or a past of other "
                "tokens; pass the whole text as input_ids, or draft with the model's own layers"
            )
        return self.proposer(self.state(rows))

    def state(self, rows: RowsView) -> PairState:
        (head,) = heads = remembered(rows, self, self.made)
        return self.state_of(self.passes, head, rows, own_bytes(heads, rows.runner.model))

    def state_of(
        self, kind: Callable[..., _Made], head: Head, rows: RowsView, weight_bytes: int, **options: Any
    ) -> _Made:
        """Make the passes of a head, of the class `kind`, over a cache of their own."""
        programs = own_programs(rows, head)
        cache = head.adapter.shared_cache(
            head.layers,
            rows.size,
            limit=max(rows.text_length(row) + rows.remaining(row) for row in rows.running) + self.block,
            slack=max(rows.controller.most.nodes, self.block),
            device=rows.last_tokens.device,
            bucket=1 if programs is None else programs.bucket,
        )
        runner = runner_for(head.layers, head.adapter, cache, programs)
        points = self.read_points(rows.runner.model, rows.runner.depth)
        numbers = rows.running, rows.runner.vocabulary, weight_bytes
        return kind(head, runner, cache, points, *numbers, **options)

    def proposer(self, state: PairState) -> HeadProposer:
        return HeadProposer(state)


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

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.kept: list[Tensor | None] = [None] * rows

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


class HeadProposer(FeatureProposer):
    """Grows drafts with a head, whose `state` holds its passes and its cache."""

    def __init__(self, state: PairState) -> None:
        super().__init__()
        self._state = state

    @property
    def nbytes(self) -> int:
        return self._state.nbytes

    def add(self, rows: RowsView, features: Features, places: Sequence[Sequence[int]]) -> None:
        self._state.add(rows, features, places)

    def known(self, rows: RowsView) -> Sequence[bool]:
        return self._state.known(rows)

    def reader(self, rows: RowsView, tree: Tree) -> Read:
        return lambda tokens, first: (
            self._state.after_text(rows, tree) if first < 0 else self._state.after(rows, tokens, first)
        )

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        self._state.read_if_many(rows)
        super().learn(rows, draft, target, verdict)

    @property
    def row_bytes(self) -> int:
        return self._state.row_bytes

    def hold(self, rows: int, tokens: int) -> None:
        self._state.hold(rows, tokens)

    def join(self, other: HeadProposer) -> None:
        self._state.join(other._state)

    def select(self, rows: Sequence[int]) -> None:
        self._state.select(rows)


class LevelProposer(HeadProposer):
    """Grows drafts of at most `most` levels from one pass of a head, which guesses all levels independently."""

    def __init__(self, state: PairState, most: int | None = None) -> None:
        super().__init__(state)
        self._most = most

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        return super().propose(rows, budget if self._most is None else budget.within(self._most))

    def reader(self, rows: RowsView, tree: Tree) -> Read:
        levels = self._state.levels_after_text(rows, tree.depth)

        def read(tokens: Tensor, first: int) -> Tensor:
            level = 0 if first < 0 else tree.depths[first]
            return levels[:, level : level + 1].expand(-1, tokens.shape[1], -1)

        return read


def remembered(rows: RowsView, drafter: Drafter, made: Callable[[PreTrainedModel], _Made]) -> _Made:
    """Return `made(model)`, made once for each drafter, device and dtype of the model."""
    model = rows.runner.model
    place = (drafter, model.device, model.dtype)
    if place not in rows.memories:
        rows.memories[place] = made(model)
    return cast(_Made, rows.memories[place])


def committed_places(rows: RowsView, verdict: Verdict) -> list[Sequence[int]]:
    """Return the places of each running row's committed tokens in the pass; the last new token has none yet."""
    found = [verdict.rows.get(row) for row in rows.running]
    return [() if row is None else [node + 1 for node in (-1, *row.path)][: len(row.tokens)] for row in found]


def share_of(nbytes: int, model: PreTrainedModel, adapter: Adapter) -> float:
    """Return the draft cost ratio c of a head that reads `nbytes` bytes in each step."""
    return nbytes / bytes_read(model, adapter)
