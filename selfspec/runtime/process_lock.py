"""A lock that is free in a forked child."""

from __future__ import annotations

import os
import threading
from types import TracebackType


class ProcessLock:
    """Admits one thread at a time, separately in each process.

    A child that is forked while a thread holds an ordinary lock inherits the held lock but not the thread, and would
    wait forever. Here each process has its own lock.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
