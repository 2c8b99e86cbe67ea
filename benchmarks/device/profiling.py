"""How often some work waits for a CUDA device, and what the device does meanwhile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# What torch says of each operation that waits, while it is asked to.
_WAITS = "called a synchronizing CUDA operation"
# Not of the whole device: the profiler does that itself.
_SYNCHRONISING = ("cudaStreamSynchronize", "cudaEventSynchronize")
_TO_HOST = "Memcpy DtoH"
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")


@dataclass
class Waits:
    """Waits of the work of a `with` block, known once it has ended.

    Attributes:
        count: how many.
    """

    count: int = 0


@contextmanager
def counted_waits() -> Iterator[Waits]:
    """Count how often the work of a `with` block waits for a CUDA device.

    Torch's debug mode for synchronisation sees operations that wait by themselves: values read, and copies to and from
    pageable memory. It does not see calls of `synchronize`. Mode and warning filters are those of the process, so
    nothing else may run meanwhile.
    """
    found, before = Waits(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        # The mode warns of itself, too, when it is first used.
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
            found.count = sum(_WAITS in str(each.message) for each in seen)


@dataclass(frozen=True)
class Activity:
    """What a CUDA device and its driver did during some work, by torch's profiler.

    Attributes:
        synchronisations: calls that wait for a stream or an event.
        copies_to_host: from the device's memory.
        launches: of kernels and graphs, by the host.
        busy_seconds: all that ran on the device, one after the other.
    """

    synchronisations: int
    copies_to_host: int
    launches: int
    busy_seconds: float


def profiled(work: Callable[[], object]) -> Activity:
    """Do some work and return what the device and its driver did. It takes longer than it does unwatched."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds, acc_events=True) as watched:
        work()
    events = watched.events() or []
    names = [event.name for event in events]
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    return Activity(
        synchronisations=sum(name in _SYNCHRONISING for name in names),
        copies_to_host=sum(event.name.startswith(_TO_HOST) for event in on_device),
        launches=sum(name in _LAUNCHES for name in names),
        busy_seconds=sum(event.time_range.elapsed_us() for event in on_device) / 1e6,
    )
