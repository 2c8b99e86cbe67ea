"""The memory that the process has, and what it may take."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_GROUP = Path("/sys/fs/cgroup")
# glibc's number of the option, and bytes: below it are a draft step's states and logits.
_MMAP_THRESHOLD, _LARGE = -3, 256 * 2**10


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


def give_large_blocks_back() -> None:
    """Let large blocks go back to the system as soon as they are freed, from now on.

    glibc keeps more and more of them otherwise: as large as the largest freed so far, between smaller ones that stay.
    """
    # Without glibc there is no such switch.
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


def status_bytes(field: str) -> int:
    """Return a size that Linux keeps of the process, in bytes: `VmRSS`, or `VmHWM`, its peak."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def machine_bytes() -> int | None:
    """The memory of the machine, or of the process's control group, in bytes; None where the system does not tell."""
    return min((*_system("SC_PHYS_PAGES"), *_group("memory.max")), default=None)


def free_bytes() -> int:
    """Bytes that are free, here and in the process's control group; what caches hold does not count as free."""
    taken = sum(_group("memory.current"))
    return min((*_system("SC_AVPHYS_PAGES"), *(most - taken for most in _group("memory.max"))), default=0)


def _system(pages: str) -> list[int]:
    with suppress(AttributeError, OSError, ValueError):
        return [os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")]
    return []


def _group(file: str) -> list[int]:
    # Without a limit the file says "max"; without control groups there is none.
    with suppress(OSError, ValueError):
        return [int((_GROUP / file).read_text())]
    return []
