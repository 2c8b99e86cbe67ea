"""Measure the memory that the process has, and what it may take; say where it keeps what it found."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_GROUP = Path("/sys/fs/cgroup")
# glibc's number of the option, and a size in bytes: a draft step's states and logits are smaller.
_MMAP_THRESHOLD, _LARGE = -3, 256 * 2**10


def resident_bytes() -> int | None:
    """Return the resident set of the process, in bytes; None if the system does not tell."""
    give_back_free_memory()
    return status_bytes("VmRSS") if _STATUS.exists() else None


def give_back_free_memory() -> None:
    """Return the allocator's free memory to the system, so that it does not hide what the work needs."""
    gc.collect()
    # Without glibc the level measured before is higher, and the peak above that level is lower.
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def give_large_blocks_back() -> None:
    """Return large blocks to the system as soon as they are freed, from now on.

    Otherwise glibc keeps freed blocks up to the size of the largest one freed so far, between smaller ones in use.
    """
    # Without glibc there is no such switch.
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


def status_bytes(field: str) -> int:
    """Return a size of the process that Linux reports, in bytes: `VmRSS`, or `VmHWM`, its peak."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def machine_bytes() -> int | None:
    """Return the memory of the machine, or of the process's control group, in bytes; None if it is not known."""
    return min((*_system("SC_PHYS_PAGES"), *_group("memory.max")), default=None)


def free_bytes() -> int:
    """Return the bytes free in the machine and the process's control group; caches do not count as free."""
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


class ProcessLock:
    """Admits one thread at a time, separately in each process.

    A child forked while a thread holds an ordinary lock inherits the held lock but not the thread, and would wait
    forever.
    """

    def __init__(self) -> None:
        self._locks: dict[int, threading.Lock] = {}
        self._held: threading.Lock | None = None

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock; return whether it was taken. See `threading.Lock.acquire`."""
        lock = self._locks.setdefault(os.getpid(), threading.Lock())
        taken = lock.acquire(blocking)
        if taken:
            self._held = lock
        return taken

    def release(self) -> None:
        """Release the lock. A thread that forks while it holds it does so in both processes."""
        assert self._held is not None
        self._held.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


def cache_folder() -> Path:
    """Return the folder in the user's cache where profiles are kept, and what trials found."""
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "selfspec" / "selfspec" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "selfspec"
    named = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(named) if named else Path.home() / ".cache") / "selfspec"
