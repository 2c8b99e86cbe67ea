"""A stand-in for a device that copies beside what it computes, on a CPU.

What makes streams hard to use is true of it too: a copy comes as late as it may, and until then nonsense
lies where it goes; and nothing may be copied to where something may still be computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec.placement.weight_source import FromHost
from selfspec.placement.weight_stream import DeviceCopies


@dataclass
class _Copy:
    to: Tensor
    source: Tensor
    done: bool = False


class StandInCopies(DeviceCopies):
    """Copies late, and checks that what reads the memory was waited for."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.copied = 0
        self.locked: list[int] = []
        self._now = 0
        self._waited = 0
        # When something was allowed last to read what lies at an address.
        self._read: dict[int, int] = {}

    def host_memory(self, size: int) -> Tensor:
        memory = torch.empty(size, dtype=torch.uint8)
        self.locked.append(memory.data_ptr())
        return memory

    def release(self, memory: Tensor) -> None:
        self.locked.remove(memory.data_ptr())

    def device_memory(self, size: int) -> Tensor:
        memory = torch.empty(size, dtype=torch.uint8)
        # Whoever had it before may read it now.
        self._read[memory.data_ptr()] = self._tick()
        return memory

    def copy(self, to: Tensor, source: Tensor, after: Sequence[Any]) -> Any:
        self._waited = max([self._waited, *after])
        assert self._waited > self._read[to.data_ptr()], "copied to where something may still be computing"
        to.view(torch.uint8).fill_(0xFF)
        return _Copy(to, source)

    def wait_for(self, copied: Any) -> None:
        self._do(copied)
        self._read[copied.to.data_ptr()] = self._tick()

    def computed(self) -> Any:
        return self._tick()

    def finish(self) -> None:
        self._waited = self._tick()

    def device_bytes(self) -> int:
        return 2**50

    def _do(self, copied: _Copy) -> None:
        if not copied.done:
            copied.done = True
            copied.to.copy_(copied.source)
            self.copied += copied.to.nbytes

    def _tick(self) -> int:
        self._now += 1
        return self._now


def stand_in_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let budgets be those of a device: weights are streamed to the CPU as they would be to a GPU."""
    monkeypatch.setattr("selfspec.api.source_for", lambda _: FromHost(StandInCopies()))
