"""A lock that a forked child finds free."""

from __future__ import annotations

import os
import threading
from types import TracebackType


class ProcessLock:
    """Lets one thread in at a time, in each process by itself.

    A child that is forked while a thread holds a lock inherits it held, and not the thread that would release it: it
    would wait for good. Here every process has a lock of its own.
    """

    def __init__(self) -> None:
        self._locks: dict[int, threading.Lock] = {}
        self._held: threading.Lock | None = None

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock; whether it was taken. See `threading.Lock.acquire`."""
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
