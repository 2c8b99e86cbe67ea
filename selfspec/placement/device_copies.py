"""Copy from page-locked memory of the host to a device while the device computes."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from selfspec.errors import UnsupportedOptionError
from selfspec.placement.byte_size import shown_bytes


class DeviceCopies(ABC):
    """Copies to one device, ordered with its computations by marks.

    A mark stands for all copies, or all computations, requested so far. Only `finish` makes the host wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def host_memory(self, size: int) -> Tensor:
        """Allocate memory of the host that the device copies from by itself, `[size]`, in bytes; see `release`.

        Raises:
            UnsupportedOptionError: there is too little memory.
        """

    @abstractmethod
    def release(self, memory: Tensor) -> None:
        """Give back memory of the host; call it before the last tensor of the memory is freed."""

    @abstractmethod
    def device_memory(self, size: int) -> Tensor:
        """Allocate memory of the device to copy to, `[size]`, in bytes."""

    @abstractmethod
    def copy(self, to: Tensor, source: Tensor, after: Sequence[Any]) -> Any:
        """Request a copy that begins after some marks of computations; return its mark."""

    @abstractmethod
    def wait_for(self, copied: Any) -> None:
        """Make later computations wait for a copy."""

    @abstractmethod
    def computed(self) -> Any:
        """Return a mark of all computations requested so far."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all copies and computations are done."""

    @abstractmethod
    def device_bytes(self) -> int:
        """Return the bytes of memory that the device has."""


class CudaCopies(DeviceCopies):
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._side = torch.cuda.Stream(device)

    def host_memory(self, size: int) -> Tensor:
        # Torch's own allocator of such memory rounds sizes up to powers of two.
        memory = torch.frombuffer(_anonymous(size), dtype=torch.uint8)
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
        if status:
            raise UnsupportedOptionError(
                f"no {shown_bytes(size)} of this machine's memory can be locked for copies to the device (CUDA error "
                f"{status}); raise memory=, so that less is streamed, or free memory of the machine"
            )
        return memory

    def release(self, memory: Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def device_memory(self, size: int) -> Tensor:
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        # After it is freed, it is not reused while a copy may be running.
        memory.record_stream(self._side)
        return memory

    def copy(self, to: Tensor, source: Tensor, after: Sequence[Any]) -> Any:
        for mark in after:
            self._side.wait_event(mark)
        with torch.cuda.stream(self._side):
            to.copy_(source, non_blocking=True)
        return self._side.record_event()

    def wait_for(self, copied: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(copied)

    def computed(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event()

    def finish(self) -> None:
        # Do not wait for the whole device: that fails while another thread captures a graph.
        self._side.synchronize()
        torch.cuda.current_stream(self.device).synchronize()

    def device_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.device).total_memory


def _anonymous(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise UnsupportedOptionError(
            f"this machine has no {shown_bytes(size)} of memory for streamed weights ({error.strerror}); raise "
            "memory=, so that less is streamed, or free memory of the machine"
        ) from error


class HostMemory:
    """Memory of the host that a device copies from. It is given back when nothing refers to this object.

    Attributes:
        bytes: the memory, `[size]`. No part of it may be kept longer than this object.

    Raises:
        UnsupportedOptionError: there is too little memory.
    """

    def __init__(self, size: int, copies: DeviceCopies) -> None:
        self.bytes = copies.host_memory(size)
        self._copies = copies

    def __del__(self) -> None:
        if "_copies" in vars(self):
            # At the end of the process the device may be gone already.
            with suppress(RuntimeError):
                self._copies.finish()
                self._copies.release(self.bytes)
