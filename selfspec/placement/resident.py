"""The memory that the process has."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int | None:
    """The resident set of the process, in bytes; None where the system does not tell."""
    give_back_free_memory()
    return status_bytes("VmRSS") if _STATUS.exists() else None


def give_back_free_memory() -> None:
    """Return what the allocator holds free, which would otherwise hide what the work needs."""
    gc.collect()
    # Without glibc the level before is higher and the peak above it lower.
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def status_bytes(field: str) -> int:
    """Return a size that Linux keeps of the process, in bytes: `VmRSS`, or `VmHWM`, its peak."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
