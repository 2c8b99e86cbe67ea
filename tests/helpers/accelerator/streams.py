"""Memory, streams, events and graphs of the stand-in accelerator.

Copies are late until somebody waits for them. Operations of a graph are noted where they ran, and run on the same
addresses again: a replay reads and writes where the capture did, whatever came since; what was decided in between is
the capture's; a capture leaves nothing behind; whatever was allocated in it is the graphs' own, who may write to it in
every replay; and it fails where the host would wait, or where it hands over memory of its own.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from helpers.accelerator.device import Accelerator


@dataclass(eq=False)
class Late:
    """A copy that was asked for, of what the source held then."""

    # Host's tensor over the memory that is written; None: all is there, and only the source is looked at.
    to: Tensor | None
    values: Tensor
    # Tensor of the host that is read, which nobody may change before; None: the device's is.
    source: Tensor | None = None
    for_host: bool = False
    done: bool = False

    def __post_init__(self) -> None:
        if self.to is None:
            return
        # What nobody should read.
        if self.to.is_floating_point():
            self.to.fill_(float("nan"))
        else:
            self.to.copy_(~self.values)

    def touches(self, address: int) -> bool:
        """Whether it reads or writes this memory of the host."""
        held = (each for each in (self.to, self.source) if each is not None)
        return any(each.untyped_storage().data_ptr() == address for each in held)

    def run(self) -> None:
        if self.done:
            return
        self.done = True
        if self.source is not None and not same_bits(self.source, self.values):
            raise AssertionError("the host changed memory that a copy to the device was still to read")
        if self.to is not None:
            self.to.copy_(self.values)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the host are equal, NaN included."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _run(copies: list[Late], host_waits: bool) -> None:
    for each in copies:
        if host_waits or not each.for_host:
            each.run()


class Stream:
    """Work in order. What computes runs at once; copies may be late."""

    def __init__(self, device: Accelerator) -> None:
        self.waited = 0
        self._device = device
        self._late: list[Late] = []

    def add(self, late: Late) -> None:
        self._late.append(late)

    def reach(self, host_waits: bool) -> None:
        """Finish what was asked for; what is for the host alone only where it is the host that waits."""
        self.waited += host_waits
        _run(self._late, host_waits)
        self._late = [each for each in self._late if not each.done]

    def come_to(self, memory: Tensor) -> None:
        """Finish copies of memory of the host, and all before them: another copy of it follows."""
        address = memory.untyped_storage().data_ptr()
        ends = [number for number, each in enumerate(self._late, 1) if each.touches(address)]
        for each in self._late[: max(ends, default=0)]:
            each.run()
        self._late = self._late[max(ends, default=0) :]

    def mark(self) -> list[Late]:
        return list(self._late)

    def synchronize(self) -> None:
        self._device.host_waits("Stream.synchronize")
        self.reach(host_waits=True)

    def wait_event(self, event: Event) -> None:
        self._follow(event.before)

    def record_event(self) -> Event:
        event = Event(self._device)
        event.record(self)
        return event

    def wait_stream(self, stream: Stream) -> None:
        self._follow(stream.mark())

    def _follow(self, copies: list[Late]) -> None:
        """Come after copies of another stream: the host does not see them yet, but what follows here does."""
        _run(copies, host_waits=False)
        left = [each for each in copies if not each.done and each not in self._late]
        self._late = [*left, *self._late]


class Event:
    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self.before: list[Late] = []
        self._stream: Stream | None = None
        self._waited = 0
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or self._device.streams.current
        self.before, self._waited = self._stream.mark(), self._stream.waited
        self._time = time.perf_counter()

    def reach(self, host_waits: bool) -> None:
        _run(self.before, host_waits)

    def synchronize(self) -> None:
        """Wait for what was asked for before it; nobody waits for what somebody has waited for already."""
        if self._stream is not None and self._stream.waited == self._waited:
            self._device.host_waits("Event.synchronize")
        self.reach(host_waits=True)

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end._time - self._time)


class Streams(threading.local):
    def __init__(self, default: Stream) -> None:
        self.default = self.current = default

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


_EXTENSION = 12
_MOST_DIMENSIONS = 8


class _Managed(ctypes.Structure):
    """`DLManagedTensor`, with sizes and strides behind it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * _MOST_DIMENSIONS),
        ("steps", ctypes.c_int64 * _MOST_DIMENSIONS),
    )


_SIZE, _SHAPE, _STRIDES = ctypes.sizeof(_Managed), _Managed.sizes.offset, _Managed.steps.offset
# What `bool`, `bfloat16` and unsigned integers are called; all others are floats or integers.
_NAMED = {torch.bool: 6, torch.bfloat16: 4, torch.uint8: 1}
# Tests put others in their places.
_empty = torch.empty
_C = ctypes.CDLL(None)
_C.malloc.restype = ctypes.c_void_p
_C.malloc.argtypes = [ctypes.c_size_t]
_FREE = ctypes.cast(_C.free, ctypes.c_void_p).value
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# Kernels of the CPU that only look at sizes, which do for every device.
SIZES_ONLY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Memory:
    """One piece of the device's memory. It lives as long as torch's storage, which holds it."""

    def __init__(self, held: torch.UntypedStorage, freed: Callable[[int], None], pool: object) -> None:
        self.held, self.nbytes, self.pool = held, held.nbytes(), pool
        self._freed = freed

    def __del__(self) -> None:
        self._freed(self.nbytes)

    def view(self, like: Tensor) -> Tensor:
        """Return the host's tensor of the sizes and strides of a tensor of the device."""
        empty = _empty(0, dtype=like.dtype)
        return empty.set_(self.held, like.storage_offset(), like.shape, like.stride())


def memory_of(tensor: Tensor) -> Memory:
    found: Memory = tensor.untyped_storage().memory  # type: ignore[attr-defined]
    return found


def device_tensor(memory: Memory, like: Tensor) -> Tensor:
    """Return a tensor of the device over new memory, of the sizes of one of the host, which begins with its memory."""
    address = _C.malloc(_SIZE)
    ctypes.memset(address, 0, _SIZE)
    managed, dtype = _Managed.from_address(address), like.dtype
    managed.data = memory.held.data_ptr()
    managed.device[0] = _EXTENSION
    managed.dimensions = like.dim()
    managed.code = _NAMED.get(dtype, 2 if dtype.is_floating_point else 0)
    managed.bits, managed.lanes = 8 * dtype.itemsize, 1
    managed.sizes[: like.dim()], managed.steps[: like.dim()] = like.shape, like.stride()
    managed.shape, managed.strides = address + _SHAPE, address + _STRIDES
    # No Python may run when a storage goes, which can be while an error is on its way.
    managed.deleter = _FREE
    found: Tensor = torch.utils.dlpack.from_dlpack(_capsule(address, b"dltensor", None))
    found.untyped_storage().memory = memory  # type: ignore[attr-defined]
    return found


def repointed(tensor: Tensor, storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """Let a tensor of the device lie in another storage, with the sizes of one of the host."""
    place: tuple[Any, ...] = (like.storage_offset(), list(like.shape), list(like.stride()))
    set_ = torch.ops.aten.set_.source_Storage_storage_offset
    found: Tensor = set_.redispatch(SIZES_ONLY, tensor, storage, *place)
    return found


def spoil(storage: torch.UntypedStorage) -> None:
    """Fill memory with nonsense: NaN, -1, and truths that are neither."""
    _empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)


class Pool:
    def __init__(self) -> None:
        self.memories: WeakSet[Memory] = WeakSet()

    def spoil(self) -> None:
        """Write nonsense, as another graph may do."""
        for each in list(self.memories):
            spoil(each.held)


@dataclass(frozen=True)
class _Place:
    """A tensor that a graph knows by its address alone."""

    address: int
    like: Tensor

    def found(self, live: WeakValueDictionary[int, Memory]) -> Tensor:
        if not self.like.numel():
            # It has no address.
            return torch.empty_like(self.like, device="cpu")
        memory = live.get(self.address)
        end = self.like.storage_offset() + 1
        end += sum((size - 1) * stride for size, stride in zip(self.like.shape, self.like.stride(), strict=True))
        if memory is None or end * self.like.element_size() > memory.nbytes:
            raise AssertionError("a graph is replayed over memory that was freed")
        return memory.view(self.like)


@dataclass
class Capture:
    device: Accelerator
    pool: Pool
    calls: list[Callable[[], None]] = field(default_factory=list)
    # Of the host, whose addresses copies read.
    _storages: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)
    _before: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def keep_for_undoing(self, written: Iterable[Tensor]) -> None:
        """Keep what stands in memory that an operation is about to write to, and that is not the graphs' own."""
        for each in written:
            if memory_of(each).pool is not self.pool:
                host = self.device.host(each)
                self._before.append((host, host.clone()))

    def undo(self) -> None:
        """Leave memory as it was before."""
        for host, before in reversed(self._before):
            host.copy_(before)
        self._before.clear()

    def note_copy(self, source: Tensor, to: Tensor) -> None:
        """Keep a copy from locked memory of the host, which reads what lies there when it is replayed."""
        self._storages.append(weakref.ref(source.untyped_storage()))
        kept, like, address = self._storages[-1], _like(source), source.untyped_storage().data_ptr()
        target = self._kept(to)

        def again() -> None:
            storage = kept()
            if storage is None or storage.data_ptr() != address:
                raise AssertionError("a graph reads memory of the host that was freed")
            source = _empty(0, dtype=like.dtype).set_(storage, like.storage_offset(), like.shape, like.stride())
            self.device.streams.current.come_to(source)
            self._now(target).copy_(source)

        self.calls.append(again)

    def check_storages(self) -> None:
        """Refuse copies of memory that is gone by the end of the capture."""
        if any(each() is None for each in self._storages):
            raise RuntimeError("operation not permitted when stream is capturing: copy of memory that is freed")

    def note(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        args, kwargs = tree_map(self._kept, args), tree_map(self._kept, kwargs)
        kept = [self._kept(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")

        def again() -> None:
            given, named = tree_map(self._now, (args, kwargs), is_leaf=_is_place)
            found = [leaf for leaf in tree_leaves(func(*given, **named)) if isinstance(leaf, Tensor)]
            for old, new in zip(map(self._now, kept), found, strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)

        self.calls.append(again)

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.device.type == "cpu":
            # A number, which is part of the launch.
            return value.clone()
        if memory_of(value).pool is self.pool:
            return self.device.host(value)
        return _Place(value.untyped_storage().data_ptr(), _like(value))

    def _now(self, value: Any) -> Any:
        return value.found(self.device.live) if isinstance(value, _Place) else value


def _is_place(value: Any) -> bool:
    return isinstance(value, _Place)


def _like(value: Tensor) -> Tensor:
    return torch.empty(0, dtype=value.dtype, device="meta").as_strided(
        value.shape, value.stride(), value.storage_offset()
    )


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._capture: Capture | None = None

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        if self._device.streams.current is self._device.streams.default:
            raise RuntimeError("operation not permitted on the default stream: capture")
        self._capture = self._device.capture = Capture(self._device, pool or Pool())

    def capture_end(self) -> None:
        assert self._capture is not None
        self._device.capture = None
        self._capture.check_storages()
        self._capture.undo()
        # Nothing ran yet.
        self._capture.pool.spoil()

    def replay(self) -> None:
        assert self._capture is not None
        self._capture.pool.spoil()
        with torch.no_grad():
            for again in self._capture.calls:
                again()
