"""Measure the memory that the process has, and what it may take; say where it keeps what it found."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_GROUPS, _GROUPS_OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# glibc's number of the option, and a size in bytes: a draft step's states and logits are smaller.
_MMAP_THRESHOLD, _LARGE = -3, 256 * 2**10


def resident_bytes() -> int | None:
    """Return the resident set of the process, in bytes; None if the system does not tell."""
    give_back_free_memory()
    if _STATUS.exists():
        return status_bytes("VmRSS")
    # As on macOS; `ps` counts in KiB.
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        said = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, check=True)
        return int(said.stdout) * 1024
    return None


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
    """Return the memory that the process may take, in bytes; None if it is not known.

    The least of the machine's, of the limits of its control groups and the groups around them, and of its own limits.
    """
    groups = [group.limit for group in _groups()]
    return min((*_system("SC_PHYS_PAGES"), *groups, *_own_limits()), default=None)


def free_bytes() -> int:
    """Return the bytes free in the machine and the process's control groups; caches do not count as free."""
    groups = [group.limit - group.usage for group in _groups()]
    return min((*_system("SC_AVPHYS_PAGES"), *groups), default=0)


class _WindowsMemory(ctypes.Structure):
    """`MEMORYSTATUSEX`, in bytes."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("length", "percent")),
        *((name, ctypes.c_uint64) for name in ("total", "free", "most", "left", "virtual", "free_virtual", "extended")),
    ]


def _system(pages: str) -> list[int]:
    if sys.platform == "win32":
        found = _WindowsMemory(length=ctypes.sizeof(_WindowsMemory))
        told = ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(found))
        return [found.total if pages == "SC_PHYS_PAGES" else found.free] if told else []
    with suppress(AttributeError, OSError, ValueError):
        return [os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")]
    return []


def _own_limits() -> list[int]:
    # Not on Windows.
    with suppress(ImportError):
        import resource

        soft = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
        return [limit for limit in soft if limit != resource.RLIM_INFINITY]
    return []


@dataclass(frozen=True)
class _Group:
    """A control group of Linux, in bytes."""

    limit: int
    usage: int


def _groups() -> Iterator[_Group]:
    """Return the groups of the process and those around them that limit memory, of versions 1 and 2."""
    try:
        lines = _GROUPS_OF_PROCESS.read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers:
            root, limit, usage = _GROUPS, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = _GROUPS / controllers, "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.strip("/")
        # A container sees its own group as the root: the path may be that of the host.
        for folder in (group, *group.parents):
            # Without a limit, version 2 says "max".
            with suppress(OSError, ValueError):
                yield _Group(int((folder / limit).read_text()), int((folder / usage).read_text()))
            if folder == root:
                break


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
