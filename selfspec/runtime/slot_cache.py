"""The cache of one pass that is a function of tensors: where it writes and what it sees are tensors themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from selfspec.cache.shared_cache import Slots


class SlotCache(Cache):
    """What a stock model takes as its cache in such a pass.

    Args:
        slot_mapping: slots of the pass's tokens, `[1 or batch, width]`.
        visible: numbers of the slots that the pass looks at, `[visible]`.
        buffers: keys and values, `[batch, heads, capacity, head_dim]` each, by layer.
        padded: whether slots past the pass's tokens may be visible.
    """

    def __init__(
        self, slot_mapping: Tensor, visible: Tensor, buffers: Mapping[int, tuple[Tensor, Tensor]], padded: bool
    ) -> None:
        super().__init__(layers=[])
        self._slot_mapping = slot_mapping
        self._visible = visible
        self._buffers = buffers
        self.padded = padded

    @classmethod
    def of_slots(cls, slots: Slots, padded: bool) -> SlotCache:
        """The cache of a whole pass."""
        pairs = zip(slots.buffers[::2], slots.buffers[1::2], strict=True)
        return cls(slots.slot_mapping, slots.visible, dict(enumerate(pairs)), padded)

    @classmethod
    def of_layer(cls, layer: int, tensors: Sequence[Tensor], padded: bool) -> SlotCache:
        """The cache of one layer, from what `tensors_of_layer` gave."""
        slot_mapping, visible, *buffers = tensors
        return cls(slot_mapping, visible, {layer: (buffers[0], buffers[1])} if buffers else {}, padded)

    def tensors_of_layer(self, layer: int) -> list[Tensor]:
        """What one layer needs of it; without buffers if it has none itself."""
        return [self._slot_mapping, self._visible, *self._buffers.get(layer, ())]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values, `[batch, heads, width, head_dim]`; return all the pass may look at."""
        keys, values = self._buffers[layer_idx]
        return self._updated(keys, key_states), self._updated(values, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Number of slots before the pass's tokens; a tensor of one where the device alone knows."""
        if self.padded:
            return self._slot_mapping[:, 0].amax()
        return _number(self._visible.shape[0]) - int(self._slot_mapping.shape[1])

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Slot of the pass's first token."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[Any, int]:
        """Number of slots the pass looks at, and the first of them."""
        return _number(self._visible.shape[0]), 0

    def _updated(self, buffer: Tensor, states: Tensor) -> Tensor:
        slots = self._slot_mapping.to(buffer.device)
        if slots.shape[0] == 1:
            buffer.index_copy_(2, slots[0], states.to(buffer.dtype))
        else:
            rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
            buffer[rows, :, slots] = states.transpose(1, 2)
        return buffer[:, :, : self._visible.shape[0]]


def _number(size: Any) -> Any:
    """A size that is no part of a trace, where models ask for one but need it for nothing; symbols stay symbols."""
    return size if isinstance(size, torch.SymInt) else int(size)
