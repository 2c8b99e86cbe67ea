"""Where a study keeps its results and its workers' claims: a database, by default a SQLite file in the study's folder.

A worker inserts a row to claim a point, so that no two do the same one. Each worker counts a heartbeat up in the
database; when it stops, for a worker was killed or its machine is gone, others take its claims over. Every worker
measures that by its own clock, so clocks of several machines need not agree.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sql

from selfspec.errors import StorageError
from selfspec.tools.studies.points import Point, Result

FILE = "study.db"
# Seconds between two heartbeats of a worker, and without any before it counts as dead.
_BEAT, _GRACE = 2.0, 30.0
# Seconds that a worker waits for others who write to a SQLite file.
_PATIENCE = 60
_PAUSE = 0.1

_TABLES = sql.MetaData()
_WORKERS = sql.Table(
    "workers",
    _TABLES,
    sql.Column("worker", sql.String(32), primary_key=True),
    sql.Column("beats", sql.Integer, nullable=False),
)
_POINTS = sql.Table(
    "points",
    _TABLES,
    sql.Column("key", sql.String(32), primary_key=True),
    # The worker that claimed it; None where it was interrupted.
    sql.Column("worker", sql.String(32)),
    # How many workers died while they had claimed it.
    sql.Column("deaths", sql.Integer, nullable=False),
    sql.Column("result", sql.JSON(none_as_null=True)),
)


@dataclass(frozen=True)
class Claim:
    """Points that this worker alone works on.

    Attributes:
        points: which.
        deaths: workers that died of them before; a point that killed one is claimed alone.
    """

    points: Sequence[Point]
    deaths: int = 0


class Board:
    """Results and claims, shared by all workers of a study. Use it as a context: inside, the worker is alive.

    Args:
        place: a folder, or the URL of a database such as `postgresql+psycopg://user@host/name`.

    Raises:
        StorageError: it cannot be used.
    """

    def __init__(self, place: str | Path) -> None:
        self.place = place
        self.worker = uuid.uuid4().hex
        self._results: dict[str, Result] = {}
        self._seen: dict[str, tuple[int, float]] = {}
        self._stopped = threading.Event()
        with self._errors():
            url = str(place)
            options: dict[str, Any] = {"pool_pre_ping": True}
            if "://" not in url:
                Path(place).mkdir(parents=True, exist_ok=True)
                url = str(sql.URL.create("sqlite", database=str(Path(place) / FILE)))
            if url.startswith("sqlite"):
                options["connect_args"] = {"timeout": _PATIENCE}
            self._engine = sql.create_engine(url, **options)
            self._create_tables()

    def __enter__(self) -> Board:
        with self._begin() as database:
            database.execute(_WORKERS.insert().values(worker=self.worker, beats=0))
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._stopped.set()
        with suppress(StorageError), self._begin() as database:
            database.execute(_WORKERS.delete().where(_WORKERS.c.worker == self.worker))
        self._engine.dispose()

    def results(self) -> Mapping[str, Result]:
        """Return what all workers have found so far, by key."""
        finished = _POINTS.c.result.is_not(None)
        with self._begin() as database:
            keys = set(database.scalars(sql.select(_POINTS.c.key).where(finished))) - self._results.keys()
            rows = database.execute(sql.select(_POINTS.c.key, _POINTS.c.result).where(_POINTS.c.key.in_(keys)))
            self._results |= {row.key: Result.from_dict(row.result) for row in rows}
        return self._results

    @contextmanager
    def claimed(self, points: Sequence[Point]) -> Iterator[Claim]:
        """Claim those of some points that nobody has done and no living worker has claimed; give back what is left."""
        try:
            yield self._claim(points)
        finally:
            self._give_back()

    def _create_tables(self) -> None:
        """Create what is missing; again where another worker was quicker with one of the two tables."""
        for attempts_left in (2, 1, 0):
            try:
                _TABLES.create_all(self._engine)
                return
            except sql.exc.DBAPIError:
                if not attempts_left:
                    raise
                time.sleep(_PAUSE)

    def _claim(self, points: Sequence[Point]) -> Claim:
        with self._begin() as database:
            keys = [point.key for point in points]
            known = {row.key: row for row in database.execute(_POINTS.select().where(_POINTS.c.key.in_(keys)))}
            dead = self._dead(database)
        claimed = []
        for point in points:
            row = known.get(point.key)
            if row is None:
                claimed += [point] if self._insert(point) else []
            elif row.result is None and (row.worker is None or row.worker in dead):
                deaths = row.deaths + (row.worker is not None)
                if deaths and claimed:
                    continue
                if self._take_over(point, row.worker, deaths):
                    claimed.append(point)
                    if deaths:
                        return Claim(claimed, deaths)
        return Claim(claimed)

    def keep(self, results: Sequence[Result]) -> None:
        """Keep what was found of claimed points; of several results of one point the first counts."""
        with self._begin() as database:
            for result in results:
                unfinished = (_POINTS.c.key == result.point.key) & _POINTS.c.result.is_(None)
                database.execute(_POINTS.update().where(unfinished).values(result=asdict(result)))

    def _give_back(self) -> None:
        # A storage that went away was reported, and its claims end with this worker.
        with suppress(StorageError), self._begin() as database:
            mine = (_POINTS.c.worker == self.worker) & _POINTS.c.result.is_(None)
            database.execute(_POINTS.update().where(mine).values(worker=None))

    def _insert(self, point: Point) -> bool:
        try:
            with self._engine.begin() as database:
                database.execute(_POINTS.insert().values(key=point.key, worker=self.worker, deaths=0))
        except sql.exc.IntegrityError:
            return False
        except Exception as error:
            raise self._error(error) from error
        return True

    def _take_over(self, point: Point, before: str | None, deaths: int) -> bool:
        same = (_POINTS.c.key == point.key) & (
            _POINTS.c.worker.is_(None) if before is None else _POINTS.c.worker == before
        )
        with self._begin() as database:
            taken = database.execute(_POINTS.update().where(same).values(worker=self.worker, deaths=deaths))
            return bool(taken.rowcount)

    def _dead(self, database: sql.Connection) -> set[str]:
        """Workers with claims whose heartbeat stopped."""
        now = time.monotonic()
        beats = {row.worker: row.beats for row in database.execute(_WORKERS.select())}
        dead = set()
        for worker in database.scalars(sql.select(_POINTS.c.worker).where(_POINTS.c.result.is_(None)).distinct()):
            if worker is None or worker == self.worker:
                continue
            known, since = self._seen.get(worker, (None, now))
            if worker not in beats:
                dead.add(worker)
            elif beats[worker] != known:
                self._seen[worker] = (beats[worker], now)
            elif now - since > _GRACE:
                dead.add(worker)
        return dead

    def _beat(self) -> None:
        while not self._stopped.wait(_BEAT):
            # The worker itself reports a storage that went away.
            with suppress(StorageError), self._begin() as database:
                alive = _WORKERS.c.worker == self.worker
                database.execute(_WORKERS.update().where(alive).values(beats=_WORKERS.c.beats + 1))

    @contextmanager
    def _begin(self) -> Iterator[sql.Connection]:
        with self._errors(), self._engine.begin() as database:
            yield database

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ImportError, sql.exc.SQLAlchemyError) as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> StorageError:
        """Turn what a storage raises that went away, is full or damaged into an error that says how to continue."""
        # Messages hold no password.
        url = "://" in str(self.place)
        shown = sql.make_url(str(self.place)).render_as_string(hide_password=True) if url else self.place
        if isinstance(error, ModuleNotFoundError):
            return StorageError(
                f"the storage {shown} needs the Python package {error.name}, which is not installed: pip install "
                f"{error.name}, or name another driver in the URL, such as postgresql+psycopg2://"
            )
        root = getattr(error, "orig", None) or error
        reason = " ".join(str(getattr(root, "strerror", None) or root).split()) or type(root).__name__
        return StorageError(
            f"the storage {shown} cannot be used ({reason}); what was finished is kept there. Repeat the command once "
            "it is back"
        )
