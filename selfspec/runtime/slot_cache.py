"""The cache of one pass that is a function of tensors: where it writes and what it sees are tensors themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from selfspec.cache.rounded_copy import CacheBits, seen_by_copies
from selfspec.cache.shared_cache import Slots


class SlotCache(Cache):
    """What a stock model takes as its cache in such a pass.

    Args:
        slots: where the pass writes, and what it sees.
        padded: whether slots past the pass's tokens may be visible.
        bits: of the copies that it sees committed tokens by; None: there are none.
    """

    def __init__(self, slots: Slots, padded: bool, bits: CacheBits | None = None) -> None:
        super().__init__(layers=[])
        self._slot_mapping = slots.slot_mapping
        self._visible = slots.visible
        self._buffers = tuple(zip(slots.buffers[::2], slots.buffers[1::2], strict=True))
        self._padded = padded
        self._bits, self._copied, self._copies = bits, slots.copied, slots.copies

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values, `[batch, heads, width, head_dim]`; return all the pass may look at."""
        written = zip(self._buffers[layer_idx], (key_states, value_states), strict=True)
        keys, values = (self._updated(buffer, states) for buffer, states in written)
        if self._bits is None or self._copied is None:
            return keys, values
        parts = self._copies[4 * layer_idx : 4 * layer_idx + 4]
        return seen_by_copies(keys, values, parts, self._copied, self._bits)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Number of slots before the pass's tokens; a tensor of one where the device alone knows."""
        if self._padded:
            return self._slot_mapping[:, 0].amax()
        return self._visible.shape[0] - self._slot_mapping.shape[1]

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Slot of the pass's first token."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[Any, int]:
        """Number of slots the pass looks at, and the first of them."""
        return self._visible.shape[0], 0

    def _updated(self, buffer: Tensor, states: Tensor) -> Tensor:
        slots = self._slot_mapping.to(buffer.device)
        if slots.shape[0] == 1:
            buffer.index_copy_(2, slots[0], states.to(buffer.dtype))
        else:
            rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
            buffer[rows, :, slots] = states.transpose(1, 2)
        return buffer[:, :, : self._visible.shape[0]]
