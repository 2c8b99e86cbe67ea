"""The most memory that some work took, above what was in use before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from selfspec.device import backend, on_host
from selfspec.process_memory import give_back_free_memory, status_bytes

_CLEAR = Path("/proc/self/clear_refs")
# Writing it to `clear_refs` makes the peak resident set begin again at the present one.
_RESET_PEAK = "5"


def peak_memory(work: Callable[[], object], device: torch.device) -> int | None:
    """Do some work and return the most memory it took above the level before, in bytes.

    On a device that is what torch allocated, where it counts that. On a CPU it is the resident set of the process,
    which Linux counts in pages and which an allocator may hold on to; None where the system does not tell.
    """
    if not on_host(device) and hasattr(backend(device), "reset_peak_memory_stats"):
        backend(device).reset_peak_memory_stats(device)
        allocated: int = backend(device).memory_allocated(device)
        work()
        most: int = backend(device).max_memory_allocated(device)
        return most - allocated
    give_back_free_memory()
    known = device.type == "cpu" and _reset_peak()
    before = status_bytes("VmRSS") if known else 0
    work()
    return max(status_bytes("VmHWM") - before, 0) if known else None


def _reset_peak() -> bool:
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True
