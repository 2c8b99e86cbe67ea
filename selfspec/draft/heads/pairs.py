"""Run a head's passes over a cache of its own, which follows the committed text.

Slot p of the cache belongs to a pair: the state of token p, and token p + 1. A committed token has the target's state;
a drafted token has the head's own, and the next draft begins by writing its slot again with the target's state.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.cache.tree import Tree
from selfspec.device import to_device
from selfspec.draft.draft import Draft, Verdict
from selfspec.draft.drafter import Drafter
from selfspec.draft.heads.head import Head
from selfspec.draft.rows_view import RowsView, check_text, made_once, remembered
from selfspec.draft.tree_growth import FeatureProposer, Read
from selfspec.formats.format import Format
from selfspec.model.early_head import plain_head
from selfspec.model.gated_view import Features, Point
from selfspec.model.layer_path import LayerPath
from selfspec.model.substitutes import Substitutes
from selfspec.runtime.request import PassRequest, PassResult
from selfspec.runtime.runner import ModelRunner, runner_for
from selfspec.runtime.runtime import with_kernels

# The most states of a row that wait for the next draft; if there are more, they are read earlier.
_MOST_WAITING = 256


class HeadDrafter(Drafter):
    """Drafts with a head that was trained on states of one target, for that target alone."""

    runs = "model"
    weight_format: Format | None = None
    """Bits of its linear layers; None: they have the dtype of the target."""

    @property
    def block(self) -> int:
        """Number of tokens that each of its drafts reads behind the last committed one; 0: the budget decides."""
        return 0

    def read_points(self, model: PreTrainedModel, depth: int) -> tuple[Point, ...]:
        """Return those of `features` that it reads of one model, in the order of `Fusion.state`; by default all."""
        return self.features(depth)

    @abstractmethod
    def head(self, model: PreTrainedModel) -> Head:
        """Make its head over a target, in its dtype and on its device. Raises `HeadError` for files of another."""

    def made(self, model: PreTrainedModel) -> Head:
        """Make this head in `weight_format`."""
        head = self.head(model)
        if self.weight_format is None:
            return head
        return head.packed(self.weight_format, Substitutes(f"layers.{plain_head(head.layers)}"))

    def begin(self, rows: RowsView) -> PairProposer:
        check_text(rows, "a draft head")
        return self.proposer(rows, made_once(rows, self, self.made))

    def proposer(self, rows: RowsView, head: Head) -> PairProposer:
        """Make the proposer that drafts with this head."""
        return PairProposer(self, rows, head)


def own_runner(rows: RowsView, head: Head, block: int) -> ModelRunner:
    """Make the runner of a head's layers, whose drafts read up to `block` tokens behind the text."""
    programs = None if rows.programs is None else remembered(rows, head, rows.programs.for_another_model)
    cache = head.adapter.shared_cache(
        head.layers,
        rows.size,
        limit=max(rows.text_length(row) + rows.remaining(row) for row in rows.running) + block,
        slack=max(rows.controller.most.nodes, block),
        device=rows.last_tokens.device,
        bucket=1 if programs is None else programs.runtime.bucket,
    )
    return runner_for(head.layers, head.adapter, cache, programs)


class PairProposer(FeatureProposer):
    """Grows drafts with a head, which reads pairs: committed pairs first and drafted ones behind them."""

    kept = 1  # pairs of each row that are left for the pass that begins a draft

    def __init__(self, drafter: HeadDrafter, rows: RowsView, head: Head) -> None:
        super().__init__()
        target = rows.runner
        self._runner = own_runner(rows, head, drafter.block)
        self._cache = self._runner.cache
        # Bytes of the weights that it does not share with the target.
        its = {weight.data_ptr() for weight in target.model.parameters()}
        parts = (head.fusion, head.layers)
        own = {weight.data_ptr(): weight.nbytes for part in parts for weight in part.parameters()}
        self._weights = sum(nbytes for place, nbytes in own.items() if place not in its)
        self._rows, self._vocabulary, self._tree = list(rows.running), target.vocabulary, Tree.chain(0)
        self.head = replace(head, fusion=with_kernels(head.fusion), layers=with_kernels(head.layers))
        self._points = drafter.read_points(target.model, target.depth)
        self._path = LayerPath(self._runner.depth, format=head.format)
        self._waiting: list[_Waiting | None] = [None] * len(self._rows)
        # The head's states of the nodes read so far, that of the last committed token first, `[rows, nodes, hidden]`.
        self._states: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self._weights + self._cache.most_bytes

    def end(self) -> None:
        self._runner.end()

    def reader(self, rows: RowsView, tree: Tree) -> Read:
        return lambda tokens, first: self.after_text(rows, tree) if first < 0 else self.after(rows, tokens, first)

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        # Pairs are read before the next draft if many are waiting.
        if max(self._counts) > _MOST_WAITING:
            self._catch_up(rows, _MOST_WAITING)
        super().learn(rows, draft, target, verdict)

    def add(self, rows: RowsView, features: Features, places: Sequence[Sequence[int]]) -> None:
        self._drop(rows.running)
        states = self.head.fusion.state([features[point] for point in self._points])
        for number, chosen in enumerate(places):
            if not chosen:
                continue
            added, waiting = states[number, to_device(chosen, states.device)], self._waiting[number]
            if waiting is None:
                self._waiting[number] = _Waiting(added)
            else:
                waiting.states = torch.cat([waiting.states, added])

    def known(self, rows: RowsView) -> list[bool]:
        self._drop(rows.running)
        return [self._reaches(number) for number in range(len(self._rows))]

    def _reaches(self, number: int) -> bool:
        return self._count(number) > 0

    def after_text(self, rows: RowsView, tree: Tree) -> Tensor:
        """Read the committed text and begin a draft; return logits after each row's last token, `[rows, 1, vocab]`."""
        logits, states = self._after_committed(rows)
        self._cache.open(tree)
        self._tree, self._states = tree, states
        return self.head.spread(logits, self._vocabulary)

    def _after_committed(self, rows: RowsView) -> tuple[Tensor, Tensor]:
        """Read all pairs; return logits and states after each row's last pair, `[rows, 1, ...]`."""
        self._drop(rows.running)
        self._catch_up(rows, self._cache.cursors.slack)
        tokens, states = self._next_pairs(rows, max(self._counts))
        last = [max(count - 1, 0) for count in self._counts]
        logits, made = self._run(self.head.fusion.inputs(self.head.embed(tokens), states), first=-1)
        self._settle(last)
        for waiting in self._waiting:
            if waiting is not None:
                waiting.first_read = True
        at = to_device(last, made.device)[:, None, None]
        return logits.gather(1, at.expand(-1, -1, logits.shape[-1])), made.gather(1, at.expand(-1, -1, made.shape[-1]))

    def after(self, rows: RowsView, tokens: Tensor, first: int) -> Tensor:
        """Read the next nodes of the draft, `[rows, nodes]`; return the logits after them, `[rows, nodes, vocab]`."""
        assert self._states is not None
        parents = [self._tree.parents[node] + 1 for node in range(first, first + tokens.shape[1])]
        inputs = self.head.fusion.inputs(self.head.embed(tokens), self._states[:, to_device(parents, tokens.device)])
        logits, states = self._run(inputs, first)
        self._states = torch.cat([self._states, states], 1)
        return self.head.spread(logits, self._vocabulary)

    @property
    def row_bytes(self) -> int:
        return self._cache.nbytes + super().row_bytes

    def hold(self, rows: int, tokens: int) -> None:
        self._cache.cursors.limit = max(self._cache.cursors.limit, tokens)
        self._cache.hold(rows, tokens)
        super().hold(rows, tokens)

    def join(self, other: PairProposer) -> None:
        for each in (self, other):
            each._close()
        longest = max(self._cache.cursors.room, other._cache.cursors.room)
        self._cache.cursors.limit = max(self._cache.cursors.limit, longest, other._cache.cursors.limit)
        self._cache.hold(max(self._cache.cursors.held, len(self._rows) + len(other._rows)), longest)
        self._cache.join(other._cache)
        self._waiting += other._waiting
        self._rows = list(range(len(self._waiting)))
        super().join(other)

    def select(self, rows: Sequence[int]) -> None:
        self._keep(rows, range(len(rows)))

    @property
    def _counts(self) -> list[int]:
        return [self._count(number) for number in range(len(self._waiting))]

    def _count(self, number: int) -> int:
        waiting = self._waiting[number]
        return 0 if waiting is None else waiting.states.shape[0]

    def _drop(self, running: Sequence[int]) -> None:
        """Drop the rows that the target no longer runs."""
        if self._rows != list(running):
            self._keep([self._rows.index(row) for row in running], running)

    def _keep(self, kept: Sequence[int], rows: Sequence[int]) -> None:
        self._close()
        self._cache.narrow(kept)
        self._waiting = [self._waiting[row] for row in kept]
        self._rows = list(rows)

    def _close(self) -> None:
        """End a draft; of its slots keep the first alone, which was read with the target's state."""
        if self._states is not None:
            self._states = None
            self._settle([int(each is not None and each.first_read and len(each.states) > 1) for each in self._waiting])

    def _settle(self, counts: Sequence[int]) -> None:
        """Move each row's cursor over `counts` pairs, which the head has read."""
        self._cache.commit(counts)
        for waiting, count in zip(self._waiting, counts, strict=True):
            if waiting is not None:
                waiting.states = waiting.states[count:]
                waiting.first_read = False

    def _catch_up(self, rows: RowsView, most: int) -> None:
        """Read pairs until each row has at most `most` of them left, besides its last `kept`."""
        self._close()
        for row, waiting in zip(self._rows, self._waiting, strict=True):
            if waiting is not None and waiting.start is None:
                # Earlier states are unknown, as in a past that the caller gave.
                waiting.start = rows.text_length(row) - 1 - len(waiting.states)
        self._cache.cursors.offsets = [0 if each is None else each.start or 0 for each in self._waiting]
        counts = self._counts
        self._cache.cursors.reserve(max(a + b for a, b in zip(self._cache.seq_lens, counts, strict=True)))
        unread = [max(count - self.kept, 0) for count in counts]
        while max(unread) > most:
            # Shorter rows are filled up; the scrap behind their cursors needs slots as well.
            width = min(max(unread), self._cache.cursors.capacity - max(self._cache.seq_lens))
            read = [min(count, width) for count in unread]
            tokens, states = self._next_pairs(rows, width)
            self._write(tokens, states, read)
            self._settle(read)
            unread = [count - done for count, done in zip(unread, read, strict=True)]

    def _write(self, tokens: Tensor, states: Tensor, counts: Sequence[int]) -> None:
        """Write keys and values of the first `counts` pairs of each row."""
        self._runner.prefill(self.head.fusion.inputs(self.head.embed(tokens), states), counts)

    def _next_pairs(self, rows: RowsView, width: int) -> tuple[Tensor, Tensor]:
        """Return tokens and states of each row's next pairs, padded: `[rows, width]` and `[rows, width, hidden]`."""
        known = next(each.states for each in self._waiting if each is not None)
        states = known.new_zeros(len(self._rows), max(width, 1), known.shape[-1])
        tokens = torch.zeros(states.shape[:2], dtype=torch.long)
        for number, waiting in enumerate(self._waiting):
            if waiting is None or waiting.start is None:
                continue
            count = min(len(waiting.states), width)
            states[number, :count] = waiting.states[:count]
            after = waiting.start + self._cache.seq_lens[number] + 1
            tokens[number, :count] = torch.tensor(rows.text(self._rows[number], after)[:count])
        return to_device(tokens, states.device), states

    def _run(self, inputs: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Run the head's layers; return logits of the tokens that it can draft, and the states for the next step."""
        result = self._runner.run(PassRequest(self._path, inputs, first=first, taps=(self.head.recycled,)))
        return result.logits, result.features[self.head.recycled]


@dataclass
class _Waiting:
    """Holds the states of a row that are not in the cache yet, `[tokens, hidden]`."""

    states: Tensor
    start: int | None = None  # number of the token that slot 0 belongs to; None: nothing was read yet
    first_read: bool = False  # True if the first of them was read, as the last pair before a draft
