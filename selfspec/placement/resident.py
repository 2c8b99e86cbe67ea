"""The memory that the process has."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


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


def machine_bytes() -> int | None:
    """The memory of the machine, or of the process's control group, in bytes; None where the system does not tell."""
    try:
        most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    limit = _GROUP_LIMIT.read_text().strip() if _GROUP_LIMIT.is_file() else "max"
    return most if limit == "max" else min(most, int(limit))
