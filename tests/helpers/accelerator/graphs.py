"""Graphs of the stand-in accelerator: operations are noted where they ran, and run on the same addresses again.

As with a graph on a device: a replay reads and writes where the capture did, whatever came since; what was decided in
between is the capture's; a capture leaves nothing behind; whatever was allocated in it is the graphs' own, who may
write to it in every replay; and it fails where the host would wait, or where it hands over memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from helpers.accelerator.streams import Memory, memory_of, spoil

if TYPE_CHECKING:
    from helpers.accelerator.device import Accelerator


class Pool:
    """Memory that graphs share for what they compute."""

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
        memory = live.get(self.address)
        end = self.like.storage_offset() + 1
        end += sum((size - 1) * stride for size, stride in zip(self.like.shape, self.like.stride(), strict=True))
        if memory is None or (self.like.numel() and end * self.like.element_size() > memory.nbytes):
            raise AssertionError("a graph is replayed over memory that was freed")
        return memory.view(self.like)


@dataclass
class Capture:
    """What a graph is to repeat."""

    device: Accelerator
    pool: Pool
    calls: list[Callable[[], None]] = field(default_factory=list)
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

    def note(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Note an operation that ran."""
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
    """Return the sizes of a tensor, without memory."""
    return torch.empty(0, dtype=value.dtype, device="meta").as_strided(
        value.shape, value.stride(), value.storage_offset()
    )


class Graph:
    """What `torch.cuda.CUDAGraph` is to CUDA."""

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
        self._capture.undo()
        # Nothing ran yet.
        self._capture.pool.spoil()

    def replay(self) -> None:
        assert self._capture is not None
        self._capture.pool.spoil()
        with torch.no_grad():
            for again in self._capture.calls:
                again()
