"""The most memory that some work took, above what was in use before it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# Writing it to `clear_refs` makes the peak resident set begin again at the present one.
_RESET_PEAK = "5"


def peak_memory(work: Callable[[], object], device: torch.device) -> int | None:
    """Do some work and return the most memory it took above the level before, in bytes.

    On CUDA that is what torch allocated. On a CPU it is the resident set of the process, which Linux counts in pages
    and which an allocator may hold on to; None where the system does not tell.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    _give_back_free_memory()
    known = device.type == "cpu" and _reset_peak()
    before = _status_bytes("VmRSS") if known else 0
    work()
    return max(_status_bytes("VmHWM") - before, 0) if known else None


def resident_bytes() -> int | None:
    """The resident set of the process, in bytes; None where the system does not tell."""
    _give_back_free_memory()
    return _status_bytes("VmRSS") if _STATUS.exists() else None


def _give_back_free_memory() -> None:
    """Return what the allocator holds free, which would otherwise hide what the work needs."""
    gc.collect()
    # Without glibc the level before is higher and the peak above it lower.
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _reset_peak() -> bool:
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
