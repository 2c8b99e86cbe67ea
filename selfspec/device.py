"""What differs between a CPU and other devices, asked of torch: no device is known here by its name, but the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def on_host(device: torch.device) -> bool:
    """Whether a device is the CPU: reading a value of a tensor there needs no copy and no wait."""
    return device.type == "cpu"


def backend(device: torch.device) -> Any:
    """Return torch's module of a device: `torch.cuda`, `torch.xpu`, ... Not all of them have streams, or graphs."""
    return getattr(torch, device.type, None)


def has_streams(device: torch.device) -> bool:
    """Whether work on a device goes in streams that the caller may choose, and copies of locked memory beside it."""
    return not on_host(device) and hasattr(backend(device), "Stream")


def has_graphs(device: torch.device) -> bool:
    """Whether launches on a device can be captured, as in a CUDA graph."""
    return not on_host(device) and hasattr(backend(device), "CUDAGraph")


def wait_for(device: torch.device) -> None:
    """Wait for what was asked of a device on this thread's stream."""
    if has_streams(device):
        # Not for the whole device: that fails while another thread captures a graph.
        backend(device).current_stream(device).synchronize()
    elif not on_host(device):
        backend(device).synchronize()


def random_state_kept() -> AbstractContextManager[None]:
    """Make a context after which torch's generators are as before it, the host's and those of all devices."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or not has_streams(found):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=range(torch.accelerator.device_count()), device_type=found.type)


def to_device(values: Tensor | Sequence[Any], device: torch.device) -> Tensor:
    """Copy what the host knows to a device. Where it has streams nobody waits for that, on either side.

    Args:
        values: tensor of the host, which nobody changes any more, or numbers; of none int64 is made.
        device: where they are needed.
    """
    known = values if isinstance(values, Tensor) else torch.tensor(values, dtype=None if len(values) else torch.long)
    # From pageable memory a copy would cost the round a synchronisation.
    return known.pin_memory().to(device, non_blocking=True) if has_streams(device) else known.to(device)


class HostCopy:
    """Values on their way to the host, asked for before somebody waits for later work: then they are there.

    Args:
        values: a tensor of some device, of which nothing is changed in place.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._event: Any = None
        if has_streams(values.device):
            self._values = values.to("cpu", non_blocking=True)
            self._event = backend(values.device).Event()
            self._event.record()

    def read(self) -> Tensor:
        """Return them as a tensor of the host. Waits where they are not there yet."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values.cpu()
