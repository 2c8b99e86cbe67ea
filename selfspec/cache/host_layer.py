"""Keys and values in memory of the host, for models on a device."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.cache.cursors import Cursors
from selfspec.cache.shared_layer import SharedLayer
from selfspec.device import has_streams


class HostLayer(SharedLayer):
    """One layer's slots on the host, the very numbers; those that a pass sees are copied to the device."""

    def __init__(self, cursors: Cursors) -> None:
        super().__init__(cursors)
        self._device = torch.device("cpu")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._device = key_states.device
        super().lazy_initialization(key_states, value_states)

    def seen(self, width: int) -> tuple[Tensor, Tensor]:
        keys, values = super().seen(width)
        return keys.to(self._device), values.to(self._device)

    def held(self) -> tuple[Tensor, Tensor]:
        return self.keys.to(self._device), self.values.to(self._device)

    def _write_pass(self, key_states: Tensor, value_states: Tensor) -> None:
        super()._write_pass(key_states.cpu(), value_states.cpu())

    def _begin_like(self, other: SharedLayer) -> None:
        assert isinstance(other, HostLayer)
        self._device = other._device

    def _slots_like(self, states: Tensor) -> Tensor:
        _, heads, _, head_dim = states.shape
        # Slots side by side, so that those which a pass sees are one copy; page-locked, so that it is a fast one.
        shape = (self._cursors.capacity, self._cursors.held, heads, head_dim)
        slots = torch.zeros(shape, dtype=states.dtype, device="cpu", pin_memory=has_streams(self._device))
        return slots.permute(1, 2, 0, 3)
