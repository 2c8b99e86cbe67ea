"""Define the sources of streamed weights, and the memory that a budget limits."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.cache.shared_layer import CacheKind
from selfspec.errors import UnsupportedOptionError
from selfspec.placement.plan import SLOTS, Bandwidth, shown_bytes
from selfspec.placement.stored import ReadBuffer, StoredTensor, WeightFiles, dtype_in_memory
from selfspec.placement.weight_stream import DeviceCopies, HostMemory, Slot
from selfspec.process import machine_bytes, resident_bytes

# Bytes of weights that are moved and multiplied to measure speed: a multiple of 4096.
_PROBED = 1 << 27
# Modules that are launched to measure how long the host takes: fewer than a device has room for in its queue.
_LAUNCHED = 200


class WeightSource(ABC):
    """Gives streamed weights to the device that computes, whose memory, `name` in messages, the budget limits."""

    device: torch.device
    name: str
    caches: tuple[CacheKind, ...]

    def in_use(self) -> int:
        """Return the bytes within the budget that are in use before a model is loaded."""
        return 0

    @abstractmethod
    def available(self) -> int | None:
        """Return the bytes of memory that a budget can use; None if the system does not tell."""

    @abstractmethod
    def dtype_in_slots(self, stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a weight in its slot, from its stored dtype and the model's dtype."""

    @abstractmethod
    def bandwidth(self, stored: Sequence[StoredTensor], files: WeightFiles) -> Bandwidth:
        """Measure how fast weights are streamed and multiplied."""

    def check_streamed(self, size: int) -> None:  # noqa: B027 - the disk has room for its files
        """Refuse more bytes of streamed weights than there is room for."""

    @abstractmethod
    def slots(self, weights: Sequence[StoredTensor], dtype: torch.dtype, files: WeightFiles) -> list[Slot]:
        """Make `SLOTS` slots that weights are fetched into."""


class FromDisk(WeightSource):
    """Streams weights from the disk, for computation on the CPU; the budget limits the process."""

    device = torch.device("cpu")
    name = "the machine, or the control group of the process,"
    caches = ("exact", "int8")

    def in_use(self) -> int:
        return resident_bytes() or 0

    def available(self) -> int | None:
        return machine_bytes()

    def dtype_in_slots(self, stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        return stored

    def bandwidth(self, stored: Sequence[StoredTensor], files: WeightFiles) -> Bandwidth:
        if not stored:
            # Nothing is streamed.
            memory = _product_bytes_a_second(torch.zeros(_PROBED // 4096, 1024))
            return Bandwidth(memory, memory)
        probed: list[StoredTensor] = []
        for weight in sorted(stored, key=lambda weight: -weight.nbytes):
            if probed and sum(each.nbytes for each in probed) + weight.nbytes > _PROBED:
                break
            probed.append(weight)
        buffer, seconds = ReadBuffer(probed[0].nbytes), 0.0
        # The first read also waits for memory, so it is not timed.
        buffer.read(files, probed[0])
        for weight in probed:
            begun = time.perf_counter()
            read = buffer.read(files, weight)
            seconds += time.perf_counter() - begun
        if not read.is_floating_point():
            read = torch.zeros(_PROBED // 4096, 2048, dtype=torch.bfloat16)
        memory = _product_bytes_a_second(read.reshape(-1, read.shape[-1] if read.ndim else 1))
        return Bandwidth(memory, sum(weight.nbytes for weight in probed) / seconds)

    def slots(self, weights: Sequence[StoredTensor], dtype: torch.dtype, files: WeightFiles) -> list[Slot]:
        # Two threads: while one waits for the interpreter, which computing holds, the other keeps the disk reading.
        reader = ThreadPoolExecutor(2, "selfspec-weights")
        return [_DiskSlot(weights, dtype, files, reader) for _ in range(SLOTS)]


class FromHost(WeightSource):
    """Streams weights from memory of the host to a device; the budget limits the device."""

    name = "the device, beside what takes its memory now,"
    caches = ("exact", "host", "int8")

    def __init__(self, copies: DeviceCopies) -> None:
        self.device, self._copies = copies.device, copies

    def available(self) -> int | None:
        return self._copies.device_bytes()

    def dtype_in_slots(self, stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        return dtype_in_memory(stored, dtype)

    def bandwidth(self, stored: Sequence[StoredTensor], files: WeightFiles) -> Bandwidth:
        copies = self._copies
        host, memory = HostMemory(_PROBED, copies), copies.device_memory(_PROBED)
        weight = torch.zeros(_PROBED // 4096, 2048, dtype=torch.bfloat16, device=self.device)
        row = weight.new_zeros(2048)

        def seconds(work: Callable[[], object], waited: Callable[[], None] = copies.finish) -> float:
            copies.finish()
            begun = time.perf_counter()
            work()
            waited()
            return time.perf_counter() - begun

        copied = min(seconds(lambda: copies.copy(memory, host.bytes, [copies.computed()])) for _ in range(3))
        multiplied = min(seconds(lambda: torch.mv(weight, row)) for _ in range(3))
        module = nn.Linear(64, 64, device=self.device, dtype=torch.bfloat16).requires_grad_(False)
        launches = [lambda: [module(row[:64]) for _ in range(_LAUNCHED)]] * 3
        # Of these the host's time alone counts.
        launched = min(seconds(each, waited=lambda: None) for each in launches) / _LAUNCHED
        return Bandwidth(_PROBED / multiplied, _PROBED / copied, launched)

    def check_streamed(self, size: int) -> None:
        there = machine_bytes()
        if there is not None and size > there:
            raise UnsupportedOptionError(
                f"{shown_bytes(size)} of weights would be streamed from memory of the host, which has "
                f"{shown_bytes(there)}; raise memory=, so that less is streamed"
            )

    def slots(self, weights: Sequence[StoredTensor], dtype: torch.dtype, files: WeightFiles) -> list[Slot]:
        kept = _HostWeights(weights, dtype, files, self._copies)
        size = max(weight.nbytes for weight in kept.weights)
        return [_DeviceSlot(kept, self._copies, size) for _ in range(SLOTS)]


def _product_bytes_a_second(weight: Tensor) -> float:
    row, times = weight.new_zeros(weight.shape[1]), []
    for _ in range(3):
        begun = time.perf_counter()
        torch.mv(weight, row)
        times.append(time.perf_counter() - begun)
    return weight.nbytes / min(times)


def source_for(device: torch.device) -> WeightSource:
    """Return the source of streamed weights for a device."""
    if device.type == "cpu":
        return FromDisk()
    if device.type == "cuda":
        return FromHost(DeviceCopies(device))
    raise UnsupportedOptionError(f"device={str(device)!r}: within a memory budget models run on cpu or cuda")


class _DiskSlot(Slot):
    def __init__(
        self, weights: Sequence[StoredTensor], dtype: torch.dtype, files: WeightFiles, reader: ThreadPoolExecutor
    ) -> None:
        self._weights, self._dtype, self._files, self._reader = weights, dtype, files, reader
        self._buffer = ReadBuffer(max(weight.nbytes for weight in weights))
        self._read: Future[Tensor] | None = None
        # The last read that was begun, which may still write to the same memory.
        self._begun: Future[Tensor] | None = None

    def fetch(self, number: int) -> None:
        # The read before is no longer needed: one that waits is given up.
        if self._read is not None and not self._read.cancel():
            self._begun = self._read
        self._read = self._reader.submit(self._after, self._begun, self._weights[number])

    def _after(self, begun: Future[Tensor] | None, weight: StoredTensor) -> Tensor:
        if begun is not None:
            wait([begun])
        return self._buffer.read(self._files, weight)

    def arrived(self) -> Tensor:
        assert self._read is not None
        read = self._read.result()
        return read.to(dtype_in_memory(read.dtype, self._dtype))


# Copies begin at multiples of this.
_ALIGNED = 256


class _HostWeights:
    """Holds weights in memory of the host, ready to copy to a device."""

    def __init__(
        self, stored: Sequence[StoredTensor], dtype: torch.dtype, files: WeightFiles, copies: DeviceCopies
    ) -> None:
        dtypes = [dtype_in_memory(weight.dtype, dtype) for weight in stored]
        sizes = [
            weight.nbytes // weight.dtype.itemsize * each.itemsize for weight, each in zip(stored, dtypes, strict=True)
        ]
        ends = list(accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes))
        self._memory = HostMemory(ends[-1], copies)
        self.weights = [
            self._memory.bytes[first : first + size].view(each).view(weight.shape)
            for weight, each, size, first in zip(stored, dtypes, sizes, [0, *ends], strict=False)
        ]
        buffer = ReadBuffer(max(weight.nbytes for weight in stored))
        for weight, kept in zip(stored, self.weights, strict=True):
            kept.copy_(buffer.read(files, weight))


class _DeviceSlot(Slot):
    def __init__(self, weights: _HostWeights, copies: DeviceCopies, size: int) -> None:
        self._weights, self._copies = weights, copies
        self._memory = copies.device_memory(size)
        self._weight = self._memory
        # Computations on the memory's old content may still run.
        self._uses = [copies.computed()]
        self._copied: Any = None

    def fetch(self, number: int) -> None:
        source = self._weights.weights[number]
        self._weight = self._memory[: source.nbytes].view(source.dtype).view(source.shape)
        self._copied = self._copies.copy(self._weight, source, self._uses)
        self._uses = []

    def arrived(self) -> Tensor:
        self._copies.wait_for(self._copied)
        return self._weight

    def used(self) -> None:
        self._uses.append(self._copies.computed())
