"""Run a head's passes over a cache of its own, which follows the committed text.

Slot p of the cache belongs to a pair: the state of token p, and token p + 1. A committed token has the target's state;
a drafted token has the head's own, and the next draft begins by writing its slot again with the target's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.tree import Tree
from selfspec.device import to_device
from selfspec.draft.heads.head import Head
from selfspec.draft.rows_view import RowsView
from selfspec.model.features import Features, Point
from selfspec.model.layer_path import LayerPath
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner
from selfspec.runtime.runtime import with_kernels

# The most states of a row that wait for the next draft; if there are more, they are read earlier.
_MOST_WAITING = 256


@dataclass
class _Waiting:
    """Holds the states of a row that are not in the cache yet, `[tokens, hidden]`.

    Attributes:
        start: number of the token that slot 0 belongs to; None: nothing was read yet.
        first_read: True if the first of them was read, as the last pair before a draft.
    """

    states: Tensor
    start: int | None = None
    first_read: bool = False


class PairState:
    """Reads pairs of a state and the token after it, committed pairs first and drafted ones behind them.

    `points` are the target's, in the order of `Fusion.state`; `vocabulary` is the number of the target's logits.

    Attributes:
        kept: number of pairs of each row that are left for the pass that begins a draft.
        following: passes of the module that reads this one's states, if there is one.
    """

    kept = 1
    following: PairState | None = None

    def __init__(
        self,
        head: Head,
        runner: ModelRunner,
        cache: SharedCache,
        points: Sequence[Point],
        rows: Sequence[int],
        vocabulary: int,
        weight_bytes: int,
    ) -> None:
        self.head = replace(head, fusion=with_kernels(head.fusion), layers=with_kernels(head.layers))
        self._runner = runner
        self._cache = cache
        self._points = points
        self._vocabulary = vocabulary
        self._weight_bytes = weight_bytes
        self._path = LayerPath(runner.depth, copy=head.copy)
        self._rows = list(rows)
        self._waiting: list[_Waiting | None] = [None] * len(rows)
        self._tree = Tree.chain(0)
        # The head's states of the nodes read so far, that of the last committed token first, `[rows, nodes, hidden]`.
        self._states: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, keys and values."""
        return self._weight_bytes + self._cache.most_bytes

    def add(self, view: RowsView, features: Features, places: Sequence[Sequence[int]]) -> None:
        """Take over the target's states of committed tokens, at these places of a pass for each running row."""
        self._drop(view.running)
        states = self.head.fusion.state([features[point] for point in self._points])
        for number, chosen in enumerate(places):
            if chosen:
                self._add(number, states[number, to_device(chosen, states.device)])

    def _add(self, number: int, states: Tensor, start: int | None = None) -> None:
        waiting = self._waiting[number]
        if waiting is None:
            self._waiting[number] = _Waiting(states, start)
        else:
            waiting.states = torch.cat([waiting.states, states])

    def read_if_many(self, view: RowsView) -> None:
        """Read pairs before the next draft if many are waiting."""
        if max(self._counts) > _MOST_WAITING:
            self._catch_up(view, _MOST_WAITING)

    def known(self, view: RowsView) -> list[bool]:
        self._drop(view.running)
        return [self._reaches(number) for number in range(len(self._rows))]

    def _reaches(self, number: int) -> bool:
        return self._count(number) > 0

    def after_text(self, view: RowsView, tree: Tree) -> Tensor:
        """Read the committed text and begin a draft; return logits after each row's last token, `[rows, 1, vocab]`."""
        logits, states = self._after_committed(view)
        self._cache.open(tree)
        self._tree, self._states = tree, states
        return self.head.spread(logits, self._vocabulary)

    def state_after_text(self, view: RowsView) -> Tensor:
        """Read the committed text; return the head's own state after each row's last token, `[rows, 1, hidden]`."""
        _, self._states = self._after_committed(view)
        return self._states

    def levels_after_text(self, view: RowsView, depth: int) -> Tensor:
        """Read the text and then `depth` unknown tokens in one pass; return their logits, `[rows, depth, vocab]`."""
        logits, self._states = self._after_committed(view, depth - 1)
        return self.head.spread(logits, self._vocabulary)

    def _after_committed(self, view: RowsView, masked: int = 0) -> tuple[Tensor, Tensor]:
        """Read all pairs and `masked` slots behind each row's last pair; return logits and states from that pair on."""
        self._drop(view.running)
        self._catch_up(view, self._cache.cursors.slack - masked)
        counts = self._counts
        tokens, states = self._next_pairs(view, max(counts) + masked)
        inputs = self.head.fusion.inputs(self.head.embed(tokens), states)
        last = to_device([max(count - 1, 0) for count in counts], inputs.device)[:, None]
        places = last + torch.arange(masked + 1, device=inputs.device)
        if self.head.masked is not None:
            rows = torch.arange(len(counts), device=inputs.device)[:, None]
            inputs[rows, places[:, 1:]] = self.head.masked
        logits, made = self._run(inputs, first=-1)
        self._settle([max(count - 1, 0) for count in counts], made)
        self._note_first_read()
        at = places[..., None]
        return logits.gather(1, at.expand(-1, -1, logits.shape[-1])), made.gather(1, at.expand(-1, -1, made.shape[-1]))

    def _note_first_read(self) -> None:
        for waiting in self._waiting:
            if waiting is not None:
                waiting.first_read = True

    def after(self, view: RowsView, tokens: Tensor, first: int) -> Tensor:
        """Read the next nodes of the draft, `[rows, nodes]`; return the logits after them, `[rows, nodes, vocab]`."""
        assert self._states is not None
        parents = [self._tree.parents[node] + 1 for node in range(first, first + tokens.shape[1])]
        inputs = self.head.fusion.inputs(self.head.embed(tokens), self._states[:, to_device(parents, tokens.device)])
        logits, states = self._run(inputs, first)
        self._states = torch.cat([self._states, states], 1)
        return self.head.spread(logits, self._vocabulary)

    @property
    def row_bytes(self) -> int:
        """Bytes of its keys and values."""
        return self._cache.nbytes

    def hold(self, rows: int, tokens: int) -> None:
        self._cache.cursors.limit = max(self._cache.cursors.limit, tokens)
        self._cache.hold(rows, tokens)

    def join(self, other: PairState) -> None:
        for each in (self, other):
            each._close()
        longest = max(self._cache.cursors.room, other._cache.cursors.room)
        self.hold(max(self._cache.cursors.held, len(self._rows) + len(other._rows)), longest)
        self._cache.cursors.limit = max(self._cache.cursors.limit, other._cache.cursors.limit)
        self._cache.join(other._cache)
        self._waiting += other._waiting
        self._rows = list(range(len(self._waiting)))

    def select(self, rows: Sequence[int]) -> None:
        self._close()
        self._cache.narrow(rows)
        self._waiting = [self._waiting[row] for row in rows]
        self._rows = list(range(len(rows)))

    @property
    def _counts(self) -> list[int]:
        return [self._count(number) for number in range(len(self._waiting))]

    def _count(self, number: int) -> int:
        waiting = self._waiting[number]
        return 0 if waiting is None else waiting.states.shape[0]

    def _drop(self, running: Sequence[int]) -> None:
        """Drop the rows that the target no longer runs."""
        if self._rows == list(running):
            return
        self._close()
        kept = [self._rows.index(row) for row in running]
        self._cache.narrow(kept)
        self._waiting = [self._waiting[row] for row in kept]
        self._rows = list(running)
        if self.following is not None:
            self.following._drop(running)

    def _close(self) -> None:
        """End a draft; of its slots keep the first alone, which was read with the target's state."""
        made, self._states = self._states, None
        if made is not None:
            read = [int(each is not None and each.first_read and len(each.states) > 1) for each in self._waiting]
            self._settle(read, made)

    def _settle(self, counts: Sequence[int], made: Tensor) -> None:
        """Move each row's cursor over `counts` pairs, of which the head made states, `[rows, tokens, hidden]`."""
        self._cache.commit(counts)
        for number, (waiting, count) in enumerate(zip(self._waiting, counts, strict=True)):
            if waiting is not None:
                if self.following is not None and count and waiting.start is not None:
                    passed = made[number, :count] if self.head.passes_on == "made" else waiting.states[:count]
                    self.following._add(number, passed, waiting.start + 1)
                waiting.states = waiting.states[count:]
                waiting.first_read = False

    def _catch_up(self, view: RowsView, most: int) -> None:
        """Read pairs until each row has at most `most` of them left, besides its last `kept`."""
        self._close()
        for row, waiting in zip(self._rows, self._waiting, strict=True):
            if waiting is not None and waiting.start is None:
                # Earlier states are unknown, as in a past that the caller gave.
                waiting.start = view.text_length(row) - 1 - len(waiting.states)
        self._cache.cursors.offsets = [0 if each is None else each.start or 0 for each in self._waiting]
        counts = self._counts
        self._cache.cursors.reserve(max(a + b for a, b in zip(self._cache.seq_lens, counts, strict=True)))
        unread = [max(count - self.kept, 0) for count in counts]
        while max(unread) > most:
            # Shorter rows are filled up; the scrap behind their cursors needs slots as well.
            width = min(max(unread), self._cache.cursors.capacity - max(self._cache.seq_lens))
            read = [min(count, width) for count in unread]
            tokens, states = self._next_pairs(view, width)
            self._settle(read, self._write(tokens, states, read))
            unread = [count - done for count, done in zip(unread, read, strict=True)]

    def _write(self, tokens: Tensor, states: Tensor, counts: Sequence[int]) -> Tensor:
        """Write keys and values of the first `counts` pairs of each row; return the states made, if needed."""
        taps = () if self.following is None else (self.head.recycled,)
        features = self._runner.prefill(self.head.fusion.inputs(self.head.embed(tokens), states), counts, taps)
        return features.get(self.head.recycled, states)

    def _next_pairs(self, view: RowsView, width: int) -> tuple[Tensor, Tensor]:
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
            tokens[number, :count] = torch.tensor(view.text(self._rows[number], after)[:count])
        return to_device(tokens, states.device), states

    def _run(self, inputs: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Run the head's layers; return logits of the tokens that it can draft, and the states for the next step."""
        result = self._runner.run(PassRequest(self._path, inputs, first=first, taps=(self.head.recycled,)))
        return result.logits, result.features[self.head.recycled]
