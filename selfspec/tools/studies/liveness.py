"""Which workers of a journal file are alive: each holds a lock of the operating system, which a killed one lets go of.

Databases need none of this: optuna's heartbeat tells there.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from filelock import FileLock, Timeout

from selfspec.errors import StorageError


class Liveness:
    """The locks of a study's workers.

    Args:
        folder: where they lie; on the file system of the journal.
    """

    def __init__(self, folder: Path) -> None:
        self.name = uuid.uuid4().hex
        self._folder = folder
        self._own = FileLock(self._file(self.name))

    def __enter__(self) -> Liveness:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._own.acquire()
        except OSError as error:
            raise StorageError(f"{self._folder} cannot be written to ({error.strerror or error})") from error
        return self

    def __exit__(self, *ended: object) -> None:
        self._own.release()
        self._file(self.name).unlink(missing_ok=True)

    def is_dead(self, worker: str) -> bool:
        """Whether a worker of that name has ended, in whatever way."""
        if worker == self.name:
            return False
        if not self._file(worker).exists():
            return True
        try:
            with FileLock(self._file(worker), timeout=0):
                return True
        except Timeout:
            return False

    def _file(self, worker: str) -> Path:
        return self._folder / f"{worker}.lock"
