"""Ask torch how a device differs from the CPU; no other device is known here by its name."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def on_host(device: torch.device) -> bool:
    """Return whether a device is the CPU, where reading a tensor's value needs no copy and no wait."""
    return device.type == "cpu"


def backend(device: torch.device) -> Any:
    """Return torch's module of a device: `torch.cuda`, `torch.xpu`, ... Not all have streams or graphs."""
    return getattr(torch, device.type, None)


def has_streams(device: torch.device) -> bool:
    """Return whether a device has streams that the caller can choose, so that copies of locked memory overlap work."""
    return not on_host(device) and hasattr(backend(device), "Stream")


def has_graphs(device: torch.device) -> bool:
    """Return whether launches on a device can be captured, as in a CUDA graph."""
    return not on_host(device) and hasattr(backend(device), "CUDAGraph")


def has_doubles(device: torch.device) -> bool:
    """Return whether a device has float64, in which drafts are drawn and judged; one that is not here may have it."""
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except TypeError:
        return False
    except (RuntimeError, AssertionError):
        return True
    return True


def wait_for(device: torch.device) -> None:
    """Wait until a device has done the work on this thread's stream."""
    if has_streams(device):
        # Not for the whole device: that fails while another thread captures a graph.
        backend(device).current_stream(device).synchronize()
    elif not on_host(device):
        backend(device).synchronize()


def device_name(device: torch.device) -> str:
    """Return the name of a device: that of its processor."""
    if not on_host(device):
        ask = getattr(backend(device), "get_device_name", None)
        return device.type if ask is None else str(ask(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


def to_device(values: Tensor | Sequence[Any], device: torch.device) -> Tensor:
    """Copy numbers, or a host tensor that no longer changes, to a device; where it has streams, neither side waits.

    An empty sequence becomes int64.
    """
    known = values if isinstance(values, Tensor) else torch.tensor(values, dtype=None if len(values) else torch.long)
    # A copy from pageable memory would cost the round a synchronisation.
    return known.pin_memory().to(device, non_blocking=True) if has_streams(device) else known.to(device)


class HostCopy:
    """Copies a tensor, not changed in place, to the host; where its device has streams, ahead of later work there."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._event: Any = None
        if has_streams(values.device):
            self._values = values.to("cpu", non_blocking=True)
            self._event = backend(values.device).Event()
            self._event.record()

    def read(self) -> Tensor:
        """Wait for the copy if needed, and return the values as a tensor on the host."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values.cpu()


class Timer:
    """Times work to its end on the device, by a clock in seconds."""

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        self._clock = clock
        self._device = device

    def now(self) -> float:
        """Return the time after all work of the device is done."""
        wait_for(self._device)
        return self._clock()

    def of(self, work: Callable[[], object]) -> float:
        """Return the seconds that a piece of work takes."""
        began = self.now()
        work()
        return self.now() - began
