"""Where a study keeps what it found: a journal file of optuna's, or a database by its URL; shared by all workers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.errors import StorageError
from selfspec.tools.studies.search.bayesian import quiet_optuna

if TYPE_CHECKING:
    import optuna

FILE = "journal.log"
# A worker on a database that was not heard of for so long counts as dead.
_HEARTBEAT, _GRACE = 10, 60


def open_storage(place: str | Path) -> optuna.storages.BaseStorage:
    """Open the storage of a study, or make it.

    Args:
        place: a folder for a journal file, on this host or a shared file system; or a URL, such as
            `postgresql://user@host/name`.

    Raises:
        StorageError: it cannot be opened.
    """
    import optuna

    with quiet_optuna(), storage_errors(place):
        if "://" in str(place):
            return optuna.storages.RDBStorage(
                str(place), heartbeat_interval=_HEARTBEAT, grace_period=_GRACE, engine_kwargs={"pool_pre_ping": True}
            )
        folder = Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        return optuna.storages.JournalStorage(_whole_lines(folder / FILE))


@contextmanager
def storage_errors(place: object) -> Iterator[None]:
    """Turn what a storage raises when it goes away, is full or is damaged into a `StorageError`."""
    import optuna
    import sqlalchemy

    # What messages call a database holds no password.
    shown = sqlalchemy.make_url(str(place)).render_as_string(hide_password=True) if "://" in str(place) else place
    try:
        yield
    except (
        OSError,
        ImportError,
        ValueError,
        AssertionError,
        sqlalchemy.exc.SQLAlchemyError,
        optuna.exceptions.StorageInternalError,
    ) as error:
        if isinstance(error, StorageError):
            raise
        # A database's own words stand at the end of a chain of others.
        root: BaseException = error
        while root.__cause__ is not None or root.__context__ is not None:
            root = root.__cause__ or root.__context__ or root
        if isinstance(root, ModuleNotFoundError):
            raise StorageError(
                f"the storage {shown} needs the Python package {root.name}, which is not installed: pip install "
                f"{root.name}, or name another driver in the URL, such as postgresql+psycopg2://"
            ) from error
        reason = " ".join(str(getattr(root, "strerror", None) or root).split()) or type(root).__name__
        raise StorageError(
            f"the storage {shown} cannot be used ({reason}); what was finished before is kept there. Repeat the "
            "command once it is back"
        ) from error


def _whole_lines(file: Path) -> Any:
    """Optuna's journal file, but a line cut off by a full disk or a kill is cut away before the next is written."""
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    lock = JournalFileOpenLock(str(file))

    class WholeLines(JournalFileBackend):
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
            lock.acquire()
            try:
                end = _end_of_lines(file)
                _cut_back(file, end)
                try:
                    with file.open("r+b") as opened:
                        opened.seek(end)
                        opened.write(lines)
                        opened.flush()
                        os.fsync(opened.fileno())
                except OSError:
                    _cut_back(file, end)
                    raise
            finally:
                lock.release()

    return WholeLines(str(file), lock)


def _end_of_lines(file: Path) -> int:
    """How long the file is up to the end of its last whole line."""
    with file.open("rb") as opened:
        end = opened.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 4096)
            opened.seek(start)
            found = opened.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def _cut_back(file: Path, size: int) -> None:
    if file.stat().st_size > size:
        os.truncate(file, size)
