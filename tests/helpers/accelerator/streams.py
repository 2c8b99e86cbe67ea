"""Streams and events of the stand-in accelerator: copies are late until somebody waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from helpers.accelerator.device import Accelerator


@dataclass(eq=False)
class Late:
    """A copy that was asked for.

    Attributes:
        to: host's tensor over the memory that is written; None: all is there, and only the source is looked at.
        values: what the source held when the copy was asked for.
        source: tensor of the host that is read, which nobody may change before; None: the device's is.
        for_host: whether the host is to read what is written.
    """

    to: Tensor | None
    values: Tensor
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

    def run(self) -> None:
        """Let it be there."""
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
        """Ask for a copy."""
        self._late.append(late)

    def reach(self, host_waits: bool) -> None:
        """Finish what was asked for; what is for the host alone only where it is the host that waits."""
        self.waited += host_waits
        _run(self._late, host_waits)
        self._late = [each for each in self._late if not each.done]

    def mark(self) -> list[Late]:
        return list(self._late)

    def synchronize(self) -> None:
        self._device.host_waits("Stream.synchronize")
        self.reach(host_waits=True)

    def wait_event(self, event: Event) -> None:
        event.reach(host_waits=False)

    def wait_stream(self, stream: Stream) -> None:
        stream.reach(host_waits=False)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._device)
        event.record(self)
        return event


class Event:
    """A place in a stream."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._before: list[Late] = []
        self._stream: Stream | None = None
        self._waited = 0
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or self._device.streams.current
        self._before, self._waited = self._stream.mark(), self._stream.waited
        self._time = time.perf_counter()

    def reach(self, host_waits: bool) -> None:
        _run(self._before, host_waits)

    def synchronize(self) -> None:
        """Wait for what was asked for before it; nobody waits for what somebody has waited for already."""
        if self._stream is not None and self._stream.waited == self._waited:
            self._device.host_waits("Event.synchronize")
        self.reach(host_waits=True)

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end._time - self._time)


class Streams(threading.local):
    """The stream that each thread works on."""

    def __init__(self, default: Stream) -> None:
        self.default = self.current = default

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Work on another stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before
