"""Weights that come from the disk into memory, read by a thread ahead of their use."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from selfspec.placement.weight_files import ReadBuffer, StoredWeight, WeightFiles
from selfspec.placement.weight_stream import Slot


def disk_slots(weights: Sequence[StoredWeight], count: int, dtype: torch.dtype, files: WeightFiles) -> list[Slot]:
    """Make slots in the model's dtype that read weights, known by number, from files."""
    # One thread: reads one after the other come at the speed of the disk, and never two into the same memory.
    reader = ThreadPoolExecutor(1, "selfspec-weights")
    return [_DiskSlot(weights, dtype, files, reader) for _ in range(count)]


class _DiskSlot(Slot):
    def __init__(
        self, weights: Sequence[StoredWeight], dtype: torch.dtype, files: WeightFiles, reader: ThreadPoolExecutor
    ) -> None:
        self._weights, self._dtype, self._files, self._reader = weights, dtype, files, reader
        self._buffer = ReadBuffer(max(weight.nbytes for weight in weights))
        self._read: Future[Tensor] = Future()

    def _fetch(self, number: int) -> None:
        # Nobody waits for the one before any more.
        self._read.cancel()
        self._read = self._reader.submit(self._buffer.read, self._files, self._weights[number])

    def arrived(self) -> Tensor:
        return self._read.result().to(self._dtype)

    def used(self) -> None:
        # What was asked for has been computed.
        return
