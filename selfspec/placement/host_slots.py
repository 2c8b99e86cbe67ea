"""Weights that come from memory of the host to a device, copied there ahead of their use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from selfspec.placement.device_copies import DeviceCopies, HostMemory
from selfspec.placement.plan import Bandwidth
from selfspec.placement.weight_files import ReadBuffer, StoredWeight, WeightFiles
from selfspec.placement.weight_stream import Slot

# Copies begin at multiples of this.
_ALIGNED = 256


def host_slots(
    weights: Sequence[StoredWeight], count: int, dtype: torch.dtype, files: WeightFiles, copies: DeviceCopies
) -> list[Slot]:
    """Read weights into memory of the host, and make slots on a device that they are copied to, in the model's dtype.

    Raises:
        UnsupportedOptionError: there is too little memory that a device can copy from.
        StorageError: the disk does not give the weights.
    """
    kept = _HostWeights(weights, dtype, files, copies)
    size = max(weight.nbytes for weight in kept.weights)
    return [_DeviceSlot(kept, copies, size) for _ in range(count)]


def host_bandwidth(copies: DeviceCopies, size: int) -> Bandwidth:
    """Measure how fast a device copies and multiplies weights, `size` bytes each time: a multiple of 4096."""
    host, memory = HostMemory(size, copies), copies.device_memory(size)
    weight = torch.zeros(size // 4096, 2048, dtype=torch.bfloat16, device=copies.device)
    row = weight.new_zeros(2048)

    def seconds(work: Any) -> float:
        copies.finish()
        begun = time.perf_counter()
        work()
        copies.finish()
        return time.perf_counter() - begun

    copied = min(seconds(lambda: copies.copy(memory, host.bytes, [copies.computed()])) for _ in range(3))
    multiplied = min(seconds(lambda: torch.mv(weight, row)) for _ in range(3))
    return Bandwidth(size / multiplied, size / copied)


class _HostWeights:
    """Weights in memory of the host, as a device copies them."""

    def __init__(
        self, stored: Sequence[StoredWeight], dtype: torch.dtype, files: WeightFiles, copies: DeviceCopies
    ) -> None:
        sizes = [weight.nbytes // weight.dtype.itemsize * dtype.itemsize for weight in stored]
        ends = list(accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes))
        self._memory = HostMemory(ends[-1], copies)
        self.weights = [
            self._memory.bytes[first : first + size].view(dtype).view(weight.shape)
            for weight, size, first in zip(stored, sizes, [0, *ends], strict=False)
        ]
        buffer = ReadBuffer(max(weight.nbytes for weight in stored))
        for weight, kept in zip(stored, self.weights, strict=True):
            kept.copy_(buffer.read(files, weight))


class _DeviceSlot(Slot):
    def __init__(self, weights: _HostWeights, copies: DeviceCopies, size: int) -> None:
        self._weights, self._copies = weights, copies
        self._memory = copies.device_memory(size)
        self._weight = self._memory
        # What had the memory before may still be computing.
        self._uses = [copies.computed()]
        self._copied: Any = None

    def _fetch(self, number: int) -> None:
        source = self._weights.weights[number]
        self._weight = self._memory[: source.nbytes].view(source.dtype).view(source.shape)
        self._copied = self._copies.copy(self._weight, source, self._uses)
        self._uses = []

    def arrived(self) -> Tensor:
        self._copies.wait_for(self._copied)
        return self._weight

    def used(self) -> None:
        self._uses.append(self._copies.computed())
