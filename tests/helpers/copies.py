"""Stand-ins for a device that copies beside what it computes, on a CPU.

What makes streams hard to use is true of the first one too: a copy comes as late as it may, and until then nonsense
lies where it goes; and nothing may be copied to where something may still be computing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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


def stand_in_device(monkeypatch: pytest.MonkeyPatch, copies: DeviceCopies | None = None) -> None:
    """Let budgets be those of a device: weights are streamed to the CPU as they would be to a GPU."""
    monkeypatch.setattr("selfspec.api.source_for", lambda _: FromHost(copies or StandInCopies()))


@dataclass
class FakeCuda:
    """What `DeviceCopies` asks of torch, on a CPU."""

    calls: list[str] = field(default_factory=list)
    status: int = 0
    registered: dict[int, int] = field(default_factory=dict)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: _Stream("side", self.calls))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: _Stream("main", self.calls))
        monkeypatch.setattr(torch.cuda, "stream", self._within)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: self.calls.append("record_stream"))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: _Properties())

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - its name
        assert flags == 0
        if not self.status:
            self.registered[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - its name
        del self.registered[address]
        return 0

    @contextmanager
    def _within(self, stream: _Stream) -> Iterator[None]:
        self.calls.append(f"begin {stream.name}")
        yield
        self.calls.append(f"end {stream.name}")


@dataclass(frozen=True)
class _Properties:
    total_memory: int = 2**50


@dataclass(frozen=True)
class _Stream:
    name: str
    calls: list[str]

    def wait_event(self, event: str) -> None:
        self.calls.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.calls.append(f"{self.name} marks")
        return f"{self.name} {len(self.calls)}"

    def synchronize(self) -> None:
        self.calls.append(f"host waits for {self.name}")
