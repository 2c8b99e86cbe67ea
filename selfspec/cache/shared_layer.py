"""Layers of the shared cache: slots of keys and values, allocated with the first tokens, and recurrent states.

A recurrent or convolutional state sums up all that its layer has read, so rolling back means restoring a copy. A pass
over a block runs these layers one token at a time: each token starts from its parent's state and leaves a copy, which
is small. Also, several architectures start a pass over several tokens from an empty state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from selfspec.cache.cursors import Cursors
from selfspec.device import has_streams, to_device, wait_for

CacheKind = Literal["exact", "host", "int8"]
"""Storage of keys and values.

`exact`: in the model's dtype, on its device. `host`: the same numbers, in host memory. `int8`: in 8 bits.
"""

CACHE_KINDS: tuple[CacheKind, ...] = get_args(CacheKind)


class SharedLayer(CacheLayerMixin):
    """Holds one layer's slots, `[batch, heads, capacity, head_dim]`: the first rows of what is stored."""

    is_sliding = False
    names: tuple[str, ...] = ("keys", "values")

    def __init__(self, cursors: Cursors) -> None:
        super().__init__()
        self._cursors = cursors
        self._stored: tuple[Tensor, ...] | None = None
        # All tensors of slots, `[batch, heads, capacity, ...]` each; none before the first tokens.
        self.parts: tuple[Tensor, ...] = ()
        self._capacity = 0

    @property
    def nbytes(self) -> int:
        """Bytes that the slots take."""
        # Read once: other threads may ask while it is replaced.
        stored = self._stored
        return 0 if stored is None else sum(slots.nbytes for slots in stored)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate slots by the heads, size and dtype of a pass's keys and values."""
        self.dtype = key_states.dtype
        self._store([self._slots_like(part) for part in self.kept(key_states[:, :, :0], value_states[:, :, :0])])
        self.is_initialized = True

    @classmethod
    def kept(cls, *states: Tensor) -> list[Tensor]:
        """Split keys and values into the parts that slots keep, `[batch, heads, tokens, ...]` each."""
        return list(states)

    @classmethod
    def read(cls, parts: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Join such parts to the keys and values that passes read, in a dtype."""
        keys, values = parts
        return keys, values

    def _store(self, parts: Sequence[Tensor]) -> None:
        self._stored, self._capacity = tuple(parts), parts[0].shape[2]
        self.show()

    def show(self) -> None:
        """Make the rows of `cursors.seq_lens` visible to passes."""
        if self._stored is not None:
            rows = len(self._cursors.seq_lens)
            self.parts = tuple(slots[:rows] for slots in self._stored)
            for name, slots in zip(self.names, self.parts, strict=True):
                setattr(self, name, slots)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a pass's keys and values, `[batch, heads, tokens, head_dim]`; return all that the pass may read."""
        if self.keys is None:
            self.lazy_initialization(key_states, value_states)
        self.grown()
        self.write_parts(self.kept(key_states, value_states))
        return self.seen(key_states.shape[2])

    def write_parts(self, parts: Sequence[Tensor]) -> None:
        """Write the parts that a pass leaves, as `kept` splits them."""
        for slots, part in zip(self.parts, parts, strict=True):
            self._write(slots, part)

    def grown(self) -> tuple[Tensor, ...]:
        """Return all slots, after allocating as many as the cursors ask for."""
        if self._capacity < self._cursors.capacity:
            self.hold()
        return self.parts

    def hold(self) -> None:
        """Reallocate to the rows and slots that the cursors ask for, and keep the contents."""
        if self._stored is not None:
            self._settle()
            parts = list(self._stored)
            self._stored, self.parts = None, ()
            for name in self.names:
                delattr(self, name)
            # One after the other, so that each old tensor is freed before the next new one is made.
            for number in range(len(parts)):
                parts[number] = self._resized(parts[number])
            self._store(parts)

    def seen(self, width: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values that a pass over `width` tokens may read."""
        return self.read([self._seen(slots, width) for slots in self.parts], self.dtype)

    def held(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all slots, as passes read them."""
        return self.read(self.parts, self.dtype)

    def narrow_slots(self, rows: Sequence[int]) -> None:
        """Keep only some rows, in the order given."""
        self._settle()
        if self._stored is not None:
            self._store([slots[to_device(rows, slots.device)] for slots in self.parts])

    def copy_rows(self, other: SharedLayer, rows: Iterable[tuple[int, int]], first: int) -> None:
        """Copy the first slots of rows of a layer of another cache, or of this one; zero what is behind them.

        `rows` has the number and the length of each; the first of them becomes row `first`, and here none moves to a
        later place.
        """
        if self._stored is None and other._stored is not None:
            self._begin_like(other)
            self._store([self._slots_like(slots) for slots in other._stored])
        self.show()
        if self._stored is None:
            return
        self._settle()
        other._settle()
        for target, (row, length) in enumerate(rows, first):
            if other is not self or row != target:
                for number, slots in enumerate(self._stored):
                    source = None if other._stored is None else other._stored[number][row]
                    _fill(slots[target], source, length)

    def _begin_like(self, other: SharedLayer) -> None:
        """Copy what another cache's layer knows of the model."""
        self.dtype = other.dtype

    def adopt(self, other: SharedLayer) -> None:
        """Take the slots of an ended cache's layer where they lie, and zero them."""
        if other._stored is not None:
            other._settle()
            self._begin_like(other)
            self._store([slots.zero_() for slots in other._stored])
            self.is_initialized = True

    def scrub(self, row: int) -> None:
        """Zero the slots past a row's end."""
        self._settle()
        for slots in self.parts:
            slots[row, :, self._cursors.seq_lens[row] :] = 0

    def copy_slots(self, sources: Tensor, targets: Tensor) -> None:
        """Copy each row's `sources` slots to its `targets` slots, `[batch, slots]` both, all at once."""
        self._settle()
        for slots in self.parts:
            rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
            slots[rows, :, targets.to(slots.device)] = slots[rows, :, sources.to(slots.device)]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cursors.visible(query_length, self._cursors.first), 0

    def get_seq_length(self) -> int:
        return max(self._cursors.seq_lens) + self._cursors.first + 1

    def get_max_length(self) -> int:
        return -1

    def _settle(self) -> None:
        """Prepare for a change of slots other than by a pass."""

    def _slots_like(self, states: Tensor) -> Tensor:
        # Zeros, because a masked slot still meets the attention's weighted sum, where 0 * NaN would be NaN.
        _, heads, _, head_dim = states.shape
        return states.new_zeros(self._cursors.held, heads, self._cursors.capacity, head_dim)

    def _resized(self, old: Tensor) -> Tensor:
        new = self._slots_like(old)
        rows, slots = min(len(old), len(new)), min(old.shape[2], new.shape[2])
        new[:rows, :, :slots] = old[:rows, :, :slots]
        return new

    def _write(self, slots: Tensor, states: Tensor) -> None:
        width, first = states.shape[2], self._cursors.first
        if self._cursors.uniform:
            start = self._cursors.seq_lens[0] + first + 1
            slots[:, :, start : start + width] = states
        else:
            rows = torch.arange(states.shape[0], device=states.device)[:, None]
            slots[rows, :, self._cursors.slots(width, first).to(states.device)] = states.transpose(1, 2)

    def _seen(self, slots: Tensor, width: int) -> Tensor:
        first = self._cursors.first
        if self._cursors.uniform or self._cursors.aligned == "left":
            return slots[:, :, : self._cursors.visible(width, first)]
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        index = self._cursors.right_aligned(width, first).clamp(min=0)
        return slots[rows, :, index.to(slots.device)].transpose(1, 2)


def _fill(row: Tensor, source: Tensor | None, length: int) -> None:
    """Copy the first slots of a row, `[heads, slots, head_dim]`, and zero the rest, where NaN may be left."""
    if source is not None:
        row[:, :length] = source[:, :length]
    row[:, 0 if source is None else length :] = 0


def from_host(slots: Tensor, count: int, device: torch.device) -> Tensor:
    """Copy the first slots of each row, `[batch, heads, slots, head_dim]`, from a `HostLayer` to a device."""
    rows, heads, _, head_dim = slots.shape
    found = torch.empty(rows, count, heads, head_dim, dtype=slots.dtype, device=device)
    for row, source in zip(found, slots, strict=True):
        row.copy_(source[:, :count].transpose(0, 1), non_blocking=True)
    return found.transpose(1, 2)


class HostLayer(SharedLayer):
    """Keeps one layer's slots exactly, on the host; slots that a pass sees are copied to the device.

    Where the device has streams, the host waits for no copy before it changes slots itself.
    """

    def __init__(self, cursors: Cursors) -> None:
        super().__init__(cursors)
        self._device = torch.device("cpu")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._device = key_states.device
        super().lazy_initialization(key_states, value_states)

    def held(self) -> tuple[Tensor, Tensor]:
        keys, values = (from_host(slots, slots.shape[2], self._device) for slots in self.parts)
        return keys, values

    def _begin_like(self, other: SharedLayer) -> None:
        super()._begin_like(other)
        assert isinstance(other, HostLayer)
        self._device = other._device

    def narrow_slots(self, rows: Sequence[int]) -> None:
        super().narrow_slots(rows)
        if self._stored is not None:
            # Into locked memory again.
            self._store([self._resized(slots) for slots in self._stored])

    def _seen(self, slots: Tensor, width: int) -> Tensor:
        self._cursors.copying = self._device
        return super()._seen(from_host(slots, self._cursors.visible(width, self._cursors.first), self._device), width)

    def _write(self, slots: Tensor, states: Tensor) -> None:
        self._cursors.copying = self._device
        for row, length, new in zip(slots, self._cursors.seq_lens, states.transpose(1, 2).contiguous(), strict=True):
            start = length + self._cursors.first + 1
            row.transpose(0, 1)[start : start + len(new)].copy_(new, non_blocking=True)

    def _settle(self) -> None:
        if self._cursors.copying is not None:
            wait_for(self._cursors.copying)
            self._cursors.copying = None

    def _slots_like(self, states: Tensor) -> Tensor:
        _, heads, _, head_dim = states.shape
        # Slots of a row side by side, so that those which a pass sees are one copy; page-locked, so that nobody waits.
        shape = (self._cursors.held, self._cursors.capacity, heads, head_dim)
        slots = torch.zeros(shape, dtype=states.dtype, device="cpu", pin_memory=has_streams(self._device))
        return slots.transpose(1, 2)


_MOST = 127
_SCALES = torch.bfloat16
_SMALLEST = torch.finfo(torch.float32).tiny


class RoundedLayer(SharedLayer):
    """Keeps one layer's slots as int8 levels of -127..127 with bfloat16 scales.

    Passes read rounded keys and values, also of their own tokens: the text does not depend on how it was drafted, but
    may differ from that of exact keys and values.
    """

    names = ("keys", "_key_scales", "values", "_value_scales")

    @classmethod
    def kept(cls, *states: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        for each in states:
            wide = each.float()
            # Scales are rounded first, then the numbers to multiples of the rounded scales.
            scale = (wide.abs().amax(-1, keepdim=True) / _MOST).clamp(min=_SMALLEST).to(_SCALES)
            found += ((wide / scale.float()).round_().clamp_(-_MOST, _MOST).to(torch.int8), scale)
        return found

    @classmethod
    def read(cls, parts: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys, of_keys, values, of_values = (part.to(dtype) for part in parts)
        return keys.mul_(of_keys), values.mul_(of_values)


Snapshot = Mapping[tuple[str, int], Tensor]
"""States of one layer after a token, by kind, "conv" or "recurrent", and number, `[batch, ...]` each."""


def snapshot_of(layer: LinearAttentionCacheLayerMixin) -> Snapshot:
    """Return the current states of a layer, not copied."""
    convolutions = {("conv", index): state for index, state in layer.conv_states.items()}
    recurrences = {("recurrent", index): state for index, state in layer.recurrent_states.items()}
    return {place: state for place, state in (convolutions | recurrences).items() if state is not None}


def mapped(snapshot: Snapshot, change: Callable[[Tensor], Tensor]) -> Snapshot:
    """Return a snapshot with `change` applied to every state."""
    return {place: change(state) for place, state in snapshot.items()}


class RecurrentLayer(LinearAttentionLayer):
    """Holds the states of one layer: the working state of `transformers`, and one snapshot for each node."""

    def __init__(self, cursors: Cursors, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states)
        self._cursors = cursors
        self.settled: Snapshot = {}  # the state after all committed tokens; empty before the first
        self._after: dict[int, Snapshot] = {}  # after each node of the open block that was read
        self.state_bytes = 0  # the most bytes that snapshots have taken so far

    def enter(self, node: int) -> None:
        """Make a copy of the parent's state the working state, which the pass may overwrite."""
        copied = mapped(self.settled if node < 0 else self._after[self._cursors.parent(node)], torch.clone)
        for index in range(self.number_of_states):
            self.conv_states[index] = copied.get(("conv", index))
            self.recurrent_states[index] = copied.get(("recurrent", index))
            self.is_conv_states_initialized[index] = ("conv", index) in copied
            self.is_recurrent_states_initialized[index] = ("recurrent", index) in copied
            self.has_previous_state[index] = bool(copied)

    def record(self, node: int) -> None:
        """Keep the working state as the state after a node."""
        self._after[node] = snapshot_of(self)
        held = [state.nbytes for each in (self.settled, *self._after.values()) for state in each.values()]
        self.state_bytes = max(self.state_bytes, sum(held))

    def nodes(self, width: int) -> range:
        """Return the nodes of the current pass."""
        return range(self._cursors.first, self._cursors.first + width)

    def take_states(self, other: RecurrentLayer, row: int) -> None:
        """Copy the states of one row of another cache's layer into the only row here."""
        self.settled = mapped(other.settled, lambda state: state[row : row + 1].clone())

    def settle(self, nodes: Sequence[int | None]) -> None:
        """Commit each row's state after its node, if any, and drop all others. KeyError: no pass has read a node."""
        # A layer may have read nothing yet: keys and values of a past are loaded before states.
        if (self.settled or self._after) and any(node is not None for node in nodes):
            # A row that has read nothing has a state of zeros.
            before = self.settled or mapped(next(iter(self._after.values())), torch.zeros_like)
            found = [before if node is None else self._after[node] for node in nodes]
            self.settled = found[0]
            if any(snapshot is not found[0] for snapshot in found):
                rows = list(enumerate(found))
                self.settled = {place: torch.stack([each[place][row] for row, each in rows]) for place in before}
        self._after = {}

    def narrow_states(self, rows: Sequence[int]) -> None:
        """Keep only some rows, in the order given."""
        self.settled = mapped(self.settled, lambda state: state[to_device(rows, state.device)])

    def join_states(self, other: RecurrentLayer, own: int, others: int) -> None:
        """Append the states of another cache's rows; rows that have read nothing have states of zeros."""
        like = self.settled or other.settled

        def nothing(rows: int) -> Snapshot:
            return mapped(like, lambda state: state.new_zeros(rows, *state.shape[1:]))

        first, second = self.settled or nothing(own), other.settled or nothing(others)
        self.settled = {place: torch.cat([first[place], second[place]]) for place in like}

    def reset(self) -> None:
        super().reset()
        self.settled, self._after = {}, {}
