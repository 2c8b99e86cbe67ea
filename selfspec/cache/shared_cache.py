"""The KV cache that draft and verification share: preallocated, with a cursor and one open block per row.

Rows are stored without padding: up to its cursor, slot i holds position i. Then comes the round's block: the last
committed token and the nodes of the draft. Passes read and write these in place; `commit` moves the cursors over
accepted tokens, and what lies after the cursors is scrap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from selfspec.cache.cursors import Cursors, OpenBlock
from selfspec.cache.masks import Window, attention_mask
from selfspec.cache.shared_layer import CacheKind, HostLayer, RecurrentLayer, RoundedLayer, SharedLayer
from selfspec.cache.source import Source
from selfspec.cache.tree import Tree
from selfspec.device import has_graphs, to_device
from selfspec.kernels.trial import runs_triton

_STEPS = 16
LAYERS: dict[CacheKind, type[SharedLayer]] = {"exact": SharedLayer, "host": HostLayer, "int8": RoundedLayer}
"""The layers of each kind of cache."""


@dataclass(frozen=True)
class Slots:
    """Holds the tensors that say where a pass reads and writes keys and values."""

    slot_mapping: Tensor  # slots of the pass's tokens, `[1, width]` where all cursors are equal, else `[batch, width]`
    positions: Tensor  # their position ids, same shape
    visible: Tensor  # numbers of the slots that the pass looks at, `[visible]`, from 0
    buffers: tuple[Tensor, ...]  # parts of each layer in turn, as `SharedLayer.kept`, `[batch, heads, capacity, ...]`
    block: OpenBlock | None = None  # the open block of the tokens; None: each sees all slots before its own
    window: Window | None = None  # that a draft attends to; None: it attends to all


class SharedCache(Cache):
    """Holds keys and values of every layer in preallocated slots, with one cursor per row.

    A block is node -1, the last committed token, in the slot at the cursor, and the nodes of a tree: node i in slot
    `cursor + i + 1`, at position `cursor + depth`. A node sees all slots before the cursor, its ancestors and itself.
    Without a call of `open` the block is a chain. Several passes may read it, each a run of nodes.

    Arguments are as in `Cursors`. Aligned on the "left", passes read ragged rows in place, and need a 4-D mask; on the
    "right", they read a left-padded copy, for models that take only a padding mask. `recurrent` are the layers with
    states, by number, as `recurrent_layers` returns them; where they have keys and values, too, these are kept exactly.
    """

    def __init__(
        self,
        depth: int,
        batch: int,
        limit: int,
        slack: int,
        device: torch.device,
        aligned: Literal["left", "right"] = "left",
        recurrent: Mapping[int, LinearAttentionCacheLayerMixin] = MappingProxyType({}),
        bucket: int = 1,
        kept: CacheKind = "exact",
    ) -> None:
        bucket = bucket if aligned == "left" and not recurrent else 1
        # The layers refer to the cursors and not to the cache: without a reference cycle, a finished generation's
        # memory is freed at once, without the garbage collector.
        self.cursors = Cursors(batch, limit, slack, device, aligned, bucket)
        self._most_bytes = 0
        self.kept = kept
        self.source: Source | None = None
        super().__init__(layers=[_layer_like(recurrent.get(index), self.cursors, kept) for index in range(depth)])
        self._slotted = [layer for layer in self.layers if isinstance(layer, SharedLayer)]
        self._recurrent = [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Cursor of each row: number of its tokens whose keys and values are here."""
        return tuple(self.cursors.seq_lens)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and the encoder's output, and the most that states have taken."""
        source = 0 if self.source is None else self.source.nbytes
        return sum(layer.nbytes for layer in self._slotted) + self.state_bytes + source

    @property
    def state_bytes(self) -> int:
        """The most bytes that states of recurrent layers have taken, copies of a round included."""
        return sum(layer.state_bytes for layer in self._recurrent)

    @property
    def lossless(self) -> bool:
        """True if passes read keys and values exactly as they were written."""
        return self.kept != "int8"

    @property
    def rolls_back_by_cursor(self) -> bool:
        """True if no layer has states, so that moving a cursor back is a full rollback."""
        return not self._recurrent

    @property
    def empty(self) -> bool:
        """True if no token has been read."""
        return not any(self.seq_lens) and not any(layer.settled for layer in self._recurrent)

    @property
    def most_bytes(self) -> int:
        """The largest `nbytes` so far."""
        return max(self._most_bytes, self.nbytes)

    def hold(self, rows: int, committed: int) -> None:
        """Allocate `rows` rows of `committed` tokens, and a draft after them. ValueError: present rows do not fit."""
        if rows < len(self.seq_lens) or min(committed, self.cursors.limit) < max(self.seq_lens):
            raise ValueError(f"{rows} rows of {committed} tokens do not hold rows of {list(self.seq_lens)}")
        self.cursors.held, self.cursors.room = rows, min(committed, self.cursors.limit)
        for layer in self._slotted:
            layer.hold()

    def end(self) -> None:
        """Drop all but the slots, which another cache may adopt."""
        self._most_bytes = self.most_bytes
        self.source = None

    def adopt(self, ended: SharedCache) -> None:
        """Take the slots of an ended cache of the same model if rows are as many, so that passes find them in place."""
        room = ended.cursors.capacity - self.cursors.slack
        fits = ended.cursors.held == self.cursors.held and room >= self.cursors.room
        parts = ended._slotted[0].parts if fits else ()
        # Tensors of inference mode can only be written in it.
        if parts and parts[0].is_inference() == torch.is_inference_mode_enabled():
            self.cursors.room = room
            for own, theirs in zip(self._slotted, ended._slotted, strict=True):
                own.adopt(theirs)

    def join(self, other: SharedCache) -> None:
        """Append the rows of another cache of the same model, then unusable. ValueError: no storage; see `hold`."""
        first, rows = len(self.seq_lens), len(other.seq_lens)
        held, room = self.cursors.held, self.cursors.room
        if first + rows > held or max(other.seq_lens) > room:
            raise ValueError(f"storage for {held} rows of {room} tokens cannot take {list(other.seq_lens)}")
        before = self.seq_lens
        self.cursors.seq_lens = [*before, *other.seq_lens]
        self.cursors.offsets = [*self.cursors.offsets, *other.cursors.offsets]
        for own, theirs in zip(self._slotted, other._slotted, strict=True):
            own.copy_rows(theirs, enumerate(other.seq_lens), first)
        for states, others in zip(self._recurrent, other._recurrent, strict=True):
            states.join_states(others, first, rows)

    def take(self, other: SharedCache, row: int, length: int) -> None:
        """Copy the first tokens of another cache's row here, as the only row. ValueError: states need all tokens."""
        if not self.rolls_back_by_cursor and length != other.seq_lens[row]:
            raise ValueError(f"states are those after {other.seq_lens[row]} tokens, not after {length}")
        self.cursors.seq_lens = [length]
        self.cursors.offsets = [other.cursors.offsets[row]]
        for own, theirs in zip(self._slotted, other._slotted, strict=True):
            own.copy_rows(theirs, [(row, length)], 0)
        for states, others in zip(self._recurrent, other._recurrent, strict=True):
            states.take_states(others, row)

    def cursors_of(self, rows: Sequence[int]) -> SharedCache:
        """Return a cache without layers, with the cursors and the open block of some rows, to compute positions."""
        part = SharedCache(0, len(rows), self.cursors.limit, self.cursors.slack, self.cursors.device)
        part.cursors = copy(self.cursors)
        part.cursors.narrow(rows)
        return part

    def keep(self, rows: Sequence[int]) -> None:
        """Keep some rows, at least one, moving each only towards the front. Storage of dropped rows stays allocated."""
        for layer in self._slotted:
            layer.copy_rows(layer, [(row, self.seq_lens[row]) for row in rows], 0)
        self._narrow_places(rows)
        for layer in self._slotted:
            layer.show()

    @property
    def draft_slots(self) -> int:
        """Most nodes that a draft may have: those with slots, or with states where layers keep some of each node."""
        free = self.cursors.capacity - max(self.seq_lens, default=0) - 1
        return free if self.rolls_back_by_cursor else self.cursors.slack

    def open(self, tree: Tree) -> None:
        """Give the block the nodes of a tree until the next commit; a later call may remove nodes, and add unread ones.

        ValueError: it has more than `draft_slots` nodes, or gives another parent to a node that a pass has read.
        """
        if len(tree) > self.draft_slots:
            raise ValueError(f"a tree of {len(tree)} nodes does not fit the {self.draft_slots} slots for a draft")
        read = min(self.cursors.read - 1, len(tree))
        if any(tree.parents[node] != self.cursors.parent(node) for node in range(read)):
            raise ValueError(f"passes have read {read} nodes of this block, which have other parents in {tree}")
        self.cursors.tree = tree
        # Nodes that the new tree does not have count as not read.
        self.cursors.read = min(self.cursors.read, len(tree) + 1)

    @contextmanager
    def reading(self, width: int, first: int = -1) -> Iterator[None]:
        """Run a pass within this context over `width` nodes from `first` on. ValueError: the open tree has fewer."""
        if self.cursors.tree is not None and first + width > len(self.cursors.tree):
            raise ValueError(f"the open tree has {len(self.cursors.tree)} nodes, and a pass asks for {first + width}")
        self.cursors.first = first
        self.cursors.read = max(self.cursors.read, first + 1 + width)
        try:
            yield
        finally:
            self.cursors.first = -1

    def commit(self, counts: Sequence[int]) -> None:
        """Move each row's cursor over its first tokens of the block. ValueError: the open tree branches among them."""
        if self.cursors.tree is not None and max(counts) - 1 > self.cursors.tree.trunk:
            raise ValueError(f"the first {max(counts) - 1} nodes of {self.cursors.tree} are no path; commit paths")
        self._settle(counts, [count - 2 if count else None for count in counts])

    def commit_paths(self, paths: Sequence[Sequence[int]]) -> None:
        """Gather a path of nodes in each row, from -1 on, and move the cursor over it. ValueError: it is no path."""
        for path in paths:
            begins = list(path[:1]) in ([], [-1])
            if not begins or any(self.cursors.parent(node) != parent for parent, node in pairwise(path)):
                raise ValueError(f"{list(path)} is no path of the block")
        self._gather(paths)
        self._settle([len(path) for path in paths], [path[-1] if path else None for path in paths])

    def _gather(self, paths: Sequence[Sequence[int]]) -> None:
        """Copy the slots of each path side by side, from the cursor on."""
        longest = max(map(len, paths))
        moved = [place for path in paths for place, node in enumerate(path) if node + 1 != place]
        if not moved:
            return
        start = min(moved)
        places = range(start, longest)
        # Slots that do not move, or belong to no path, are copied onto themselves.
        sources = [
            [length + (path[place] + 1 if place < len(path) else place) for place in places]
            for length, path in zip(self.seq_lens, paths, strict=True)
        ]
        targets = [[length + place for place in places] for length in self.seq_lens]
        device = self.cursors.device
        slots = to_device([sources, targets], device)
        if runs_triton(slots.device):
            from selfspec.kernels.triton_slots import moved_at_once

            parts = [part for layer in self._slotted for part in layer.parts]
            if all(part.device == slots.device for part in parts) and moved_at_once(parts, slots[0], slots[1]):
                return
        for layer in self._slotted:
            layer.copy_slots(slots[0], slots[1])

    def _settle(self, counts: Sequence[int], nodes: Sequence[int | None]) -> None:
        self.cursors.move(counts)
        for layer in self._recurrent:
            layer.settle(nodes)

    def record(self, width: int) -> None:
        """Keep the states that a stock pass over the first `width` tokens of the block left in recurrent layers."""
        for layer in self._recurrent:
            layer.record(width - 2)

    def narrow(self, rows: Sequence[int]) -> None:
        """Keep only some rows, in the order given, and free the memory of all dropped rows."""
        self._most_bytes = self.most_bytes
        self._narrow_places(rows)
        self.cursors.held = len(rows)
        if self.source is not None:
            self.source.narrow(rows)
        for layer in self._slotted:
            layer.narrow_slots(rows)

    def _narrow_places(self, rows: Sequence[int]) -> None:
        """Keep only some rows of all but the slots."""
        self.cursors.narrow(rows)
        for layer in self._recurrent:
            layer.narrow_states(rows)

    def scrub(self, rows: Sequence[int]) -> None:
        """Zero the scrap of some rows: even masked, NaN there would spoil attention over these slots."""
        for layer in self._slotted:
            for row in rows:
                layer.scrub(row)

    def prefill_width(self, unread: Sequence[int], most: int | None = None) -> int:
        """Return how many tokens the next pass of the prefill reads, at most `most`: all if no layer has states.

        Recurrent layers would take tokens past a row's end into their states: they first read the tokens that all rows
        have, then a few at a time, since each leaves a copy.
        """
        at_once = (max if self.rolls_back_by_cursor else min)(unread)
        return min(at_once, most or at_once) if at_once else min(max(unread), _STEPS, most or _STEPS)

    @property
    def for_model(self) -> Cache:
        """Cache argument of a stock model."""
        return self if self.source is None else self.source.beside(self)

    def slots(self, width: int, first: int = -1, window: Window | None = None) -> Slots | None:
        """Return the tensors that a pass needs to read this cache, or a window of it, and write to it.

        None where they are not enough: layers have states, ragged rows are aligned on the right, rows have different
        offsets, keys and values are on the host and the device captures nothing, or some layer has read no tokens yet.
        """
        laid_out = self.rolls_back_by_cursor and (self.cursors.uniform or self.cursors.aligned == "left")
        laid_out = laid_out and self.cursors.shifted_alike
        laid_out = laid_out and (self.kept != "host" or has_graphs(self.cursors.device))
        if not laid_out or not all(layer.parts for layer in self._slotted):
            return None
        slots, block = self.cursors.slots(width, first), self.cursors.block(width, first)
        return Slots(
            slots,
            self.cursors.position_ids(width, first),
            self.cursors.numbers(0, self.cursors.visible(width, first)),
            tuple(chain.from_iterable([layer.grown() for layer in self._slotted])),
            block,
            window,
        )

    def write(self, parts: Sequence[Tensor], width: int) -> None:
        """Write the first tokens that a recorded pass left for slots on the host: parts of each layer in turn."""
        count = len(LAYERS[self.kept].names)
        for number, layer in enumerate(self._slotted):
            own = parts[count * number : count * (number + 1)]
            # Some layers may not have run.
            if own[0].numel():
                layer.write_parts([part[:, :, :width] for part in own])

    def attention_mask(
        self,
        config: PreTrainedConfig,
        width: int,
        dtype: torch.dtype,
        first: int = -1,
        window: Window | None = None,
    ) -> Any:
        """Make the `attention_mask` of a stock model for a pass over some nodes of the block.

        It is None if all cursors are equal and each token sees exactly the slots up to its own: the stock model then
        derives it from `get_query_offset` and `get_mask_sizes`. Rows aligned on the right get a padding mask `[batch,
        slots]`.
        """
        padded, block = self.cursors.padded(width), self.cursors.block(width, first)
        plain = self.cursors.uniform and not padded and block is None and window is None
        if plain or not self._slotted:
            return None
        if self.cursors.aligned == "right":
            return (self.cursors.right_aligned(width, first) >= 0).long()
        return attention_mask(
            config,
            self.cursors.slots(width, first),
            len(self.seq_lens),
            self.cursors.visible(width, first),
            dtype,
            block=block,
            recurrent=not self.rolls_back_by_cursor,
            padded=padded,
            window=window,
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of slots before the tokens of the pass, in the row with the furthest cursor."""
        return max(self.seq_lens) + self.cursors.first + 1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return how many slots a pass over `query_length` tokens looks at, and the first of them."""
        return self.cursors.visible(query_length, self.cursors.first), 0


def recurrent_layers(config: PreTrainedConfig) -> dict[int, LinearAttentionCacheLayerMixin]:
    """Return the layers with recurrent or convolutional state, by number, as `transformers` would keep them."""
    layers = DynamicCache(config=config).layers
    return {index: layer for index, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)}


def _layer_like(
    stock: LinearAttentionCacheLayerMixin | None, cursors: Cursors, kept: CacheKind
) -> CacheLayerMixin | LinearAttentionCacheLayerMixin:
    if stock is None:
        return LAYERS[kept](cursors)
    if isinstance(stock, CacheLayerMixin):
        return _RecurrentSharedLayer(cursors, stock.number_of_states)
    return RecurrentLayer(cursors, stock.number_of_states)


class _RecurrentSharedLayer(RecurrentLayer, SharedLayer):
    """Both slots of keys and values, and states."""

    def __init__(self, cursors: Cursors, number_of_states: int) -> None:
        SharedLayer.__init__(self, cursors)
        RecurrentLayer.__init__(self, cursors, number_of_states)

    def lazy_initialization(self, *slots: Tensor, **states: Any) -> None:
        """Initialise slots from attention's positional keys and values, or states from keyword arguments."""
        if slots:
            SharedLayer.lazy_initialization(self, *slots)
        else:
            RecurrentLayer.lazy_initialization(self, **states)


class CacheReader:
    """Stands in for a cache from which an attention reads keys and values without writing its own."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return all slots that the pass may look at in a layer; those of its tokens are from an earlier pass."""
        seen: tuple[Tensor, Tensor] = self._cache.layers[layer].seen(key_states.shape[2])
        return seen
