"""Stream weights: fetch them when a pass needs them, and the next ones while it computes."""

from __future__ import annotations

import mmap
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.errors import UnsupportedModelError, UnsupportedOptionError
from selfspec.model.view import copied, is_streamed
from selfspec.placement.plan import shown_bytes


class DeviceCopies:
    """Copies to one device on a stream of its own; marks order copies with computations. Only `finish` waits."""

    # Module of streams.
    _backend: Any = torch.cuda

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = self._backend.Stream(device)

    def host_memory(self, size: int) -> Tensor:
        """Allocate memory of the host that the device copies from by itself, `[size]`, in bytes; see `release`."""
        try:
            # Torch's own allocator of such memory rounds sizes up to powers of two.
            allocated = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise _no_memory(
                f"this machine has no {shown_bytes(size)} of memory for streamed weights", error.strerror
            ) from error
        memory = torch.frombuffer(allocated, dtype=torch.uint8)
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
        if status:
            what = f"no {shown_bytes(size)} of this machine's memory can be locked for copies to the device"
            raise _no_memory(what, f"CUDA error {status}")
        return memory

    def release(self, memory: Tensor) -> None:
        """Give back memory of the host; call it before the last tensor of the memory is freed."""
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def device_memory(self, size: int) -> Tensor:
        """Allocate memory of the device to copy to, `[size]`, in bytes."""
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        # After it is freed, it is not reused while a copy may be running.
        memory.record_stream(self._side)
        return memory

    def copy(self, to: Tensor, source: Tensor, after: Sequence[Any]) -> Any:
        """Request a copy that begins after some marks of computations; return its mark."""
        for mark in after:
            self._side.wait_event(mark)
        with self._backend.stream(self._side):
            to.copy_(source, non_blocking=True)
        return self._side.record_event()

    def wait_for(self, copied: Any) -> None:
        """Make later computations wait for a copy."""
        self._backend.current_stream(self.device).wait_event(copied)

    def computed(self) -> Any:
        """Return a mark of all computations requested so far."""
        return self._backend.current_stream(self.device).record_event()

    def finish(self) -> None:
        """Wait until all copies and computations are done."""
        # Do not wait for the whole device: that fails while another thread captures a graph.
        self._side.synchronize()
        self._backend.current_stream(self.device).synchronize()

    def device_bytes(self) -> int:
        """Return the bytes of memory of the device that no other process takes, and no tensor of this one."""
        free = int(self._backend.mem_get_info(self.device)[0])
        held: int = self._backend.memory_reserved(self.device) - self._backend.memory_allocated(self.device)
        return free + held


def _no_memory(what: str, reason: object) -> UnsupportedOptionError:
    return UnsupportedOptionError(
        f"{what} ({reason}); raise memory=, so that less is streamed, or free memory of the machine"
    )


class HostMemory:
    """Holds memory of the host that a device copies from, `[size]` in bytes; it is freed with this object.

    No view of `bytes` may outlive this object.
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


# A pass that requests nothing for this time, in seconds, was abandoned, or leaves the network early.
_PAUSE = 0.5


class Slot(ABC):
    """Holds one weight at a time, where modules compute; `holds` is its number from the start of its fetch."""

    holds: int | None = None

    @abstractmethod
    def fetch(self, number: int) -> None:
        """Begin to fetch a weight in place of the present one. Does not wait for it."""

    @abstractmethod
    def arrived(self) -> Tensor:
        """Return the weight, ready for later computations."""

    def used(self) -> None:  # noqa: B027 - on the CPU all uses have been computed by then
        """Note that all uses of the weight so far have been requested; they may still be computing."""


class WeightStream:
    """Streams weights into a few slots, at least 2 more than one module uses, in the order of use, learnt from passes.

    `sizes` are in bytes. Passes of several threads take turns; a pass that fails leaves nothing behind.
    """

    def __init__(self, sizes: Sequence[int], slots: Sequence[Slot]) -> None:
        self._sizes, self._slots = list(sizes), list(slots)
        self._next = {number: (number + 1) % len(sizes) for number in range(len(sizes))}
        self._last: int | None = None
        self._turn = threading.Condition()
        self._owner: int | None = None
        self._lent = False
        self._since = 0.0
        self.bytes_moved = 0

    @contextmanager
    def lend(self, numbers: Sequence[int]) -> Iterator[list[Tensor]]:
        """Lend weights, by number, while a module uses them."""
        self._take_turn()
        try:
            yield self._lent_weights(numbers)
        finally:
            try:
                for slot in self._slots:
                    if slot.holds in numbers:
                        slot.used()
            finally:
                with self._turn:
                    self._lent, self._since = False, time.monotonic()
                    if self._last == len(self._sizes) - 1:
                        self._owner = None
                    self._turn.notify_all()

    def _take_turn(self) -> None:
        me = threading.get_ident()
        with self._turn:
            while self._lent or self._owner not in (None, me):
                if not self._lent and time.monotonic() - self._since > _PAUSE:
                    break
                self._turn.wait(_PAUSE)
            self._owner, self._lent = me, True

    def _lent_weights(self, numbers: Sequence[int]) -> list[Tensor]:
        for number in numbers:
            if self._last is not None:
                self._next[self._last] = number
            self._last = number
        try:
            slots = [self._slot(number, numbers) for number in numbers]
            wanted = [*numbers]
            while len(wanted) < len(self._slots):
                following = self._next[wanted[-1]]
                if following in wanted:
                    break
                wanted.append(following)
                self._slot(following, wanted)
            return [slot.arrived() for slot in slots]
        except BaseException:
            # The next pass fetches these weights again, and those that were being fetched.
            for slot in self._slots:
                slot.holds = None
            raise

    def _slot(self, number: int, wanted: Sequence[int]) -> Slot:
        """Return the slot that holds a weight, or begin to fetch it; weights in `wanted` stay in their slots."""
        for slot in self._slots:
            if slot.holds == number:
                return slot
        slot = next(slot for slot in self._slots if slot.holds is None or slot.holds not in wanted)
        slot.holds = number
        slot.fetch(number)
        self.bytes_moved += self._sizes[number]
        return slot


def stream_module(
    module: nn.Module,
    numbers: Sequence[int],
    stream: WeightStream,
    made: Callable[[Sequence[Tensor]], Mapping[str, nn.Parameter]],
) -> None:
    """Let a module make parameters from a stream whenever it runs, `made` of what has these numbers there."""
    kind = type(module)

    @contextmanager
    def streams() -> Iterator[nn.Module]:
        with stream.lend(numbers) as parts:
            lent = copied(module)
            del lent.__dict__["forward"], lent.__dict__["streams"]
            lent.__dict__["_parameters"] = {**module._parameters, **made(parts)}
            yield lent

    def forward(*args: Any, **kwargs: Any) -> Any:
        with streams() as lent:
            return kind.forward(lent, *args, **kwargs)

    module.__dict__["forward"] = forward
    # See `is_streamed`. Callers that need the weights get them here: the module with its weights in memory.
    module.__dict__["streams"] = streams


def check_in_memory(model: nn.Module, what: str) -> None:
    """Refuse an operation that needs all weights of a model in memory."""
    if any(map(is_streamed, model.modules())):
        raise UnsupportedModelError(
            f"{type(model).__name__} streams its weights, so it cannot be {what}; load it whole with from_pretrained"
        )
