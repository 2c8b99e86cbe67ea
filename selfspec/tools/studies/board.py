"""Where a study keeps its results and its workers' claims: a database, by default a SQLite file in the study's folder.

A worker writes its name into a point's row to claim it, so that no two do the same one, and counts a heartbeat up
there. When that stops, for the worker was killed or its machine is gone, others take the point over. Every worker
measures that by its own clock, so clocks of several machines need not agree.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import sqlalchemy as sql

from selfspec.errors import StorageError
from selfspec.tools.studies.points import Point, Result

FILE = "study.db"
# Seconds between two heartbeats of a worker, and without any before it counts as dead.
_BEAT, _GRACE = 2.0, 30.0
# A point that killed so many workers is given up.
_MOST_DEATHS = 3
# Seconds that a worker waits for others who write to a SQLite file.
_PATIENCE = 60

_POINTS = sql.Table(
    "claims",
    sql.MetaData(),
    sql.Column("key", sql.String(32), primary_key=True),
    # The worker that claimed it; None where it was interrupted.
    sql.Column("worker", sql.String(32)),
    sql.Column("beats", sql.Integer, nullable=False),
    # How many workers died while they had claimed it.
    sql.Column("deaths", sql.Integer, nullable=False),
    sql.Column("result", sql.JSON(none_as_null=True)),
)
_OPEN = _POINTS.c.result.is_(None)


class Board:
    """Results and claims, shared by all workers of a study. Use it as a context: inside, the worker is alive.

    Args:
        place: a folder, or the URL of a database such as `postgresql+psycopg://user@host/name`.

    Raises:
        StorageError: it cannot be used.
    """

    def __init__(self, place: str | Path) -> None:
        self.place = str(place)
        self.worker = uuid.uuid4().hex
        self._mine = _OPEN & (_POINTS.c.worker == self.worker)
        self._results: dict[str, Result] = {}
        self._seen: dict[str, tuple[tuple[str | None, int], float]] = {}
        self._stopped = threading.Event()
        with self._errors():
            url = self.place
            if "://" not in url:
                Path(place).mkdir(parents=True, exist_ok=True)
                url = str(sql.URL.create("sqlite", database=str(Path(place) / FILE)))
            patience = {"timeout": _PATIENCE} if url.startswith("sqlite") else {}
            self._engine = sql.create_engine(url, pool_pre_ping=True, connect_args=patience)
            with self._engine.begin() as database:
                database.execute(sql.schema.CreateTable(_POINTS, if_not_exists=True))

    def __enter__(self) -> Board:
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._stopped.set()
        self._engine.dispose()

    def results(self) -> Mapping[str, Result]:
        """Return what all workers have found so far, by key."""
        with self._begin() as database:
            keys = set(database.scalars(sql.select(_POINTS.c.key).where(~_OPEN))) - self._results.keys()
            for found in database.scalars(sql.select(_POINTS.c.result).where(_POINTS.c.key.in_(keys))):
                result = Result(**{**found, "point": Point(**found["point"])})
                self._results[result.point.key] = result
        return self._results

    @contextmanager
    def claimed(self, points: Sequence[Point]) -> Iterator[Sequence[Point]]:
        """Claim those of some points that nobody has done and no living worker has claimed; give back what is left.

        A point that killed a worker is claimed alone.
        """
        try:
            yield self._claim(points)
        finally:
            # A storage that went away was reported, and its claims end with this worker.
            with suppress(StorageError):
                self._update(self._mine, worker=None)

    def keep(self, results: Sequence[Result]) -> None:
        """Keep what was found of claimed points; of several results of one point the first counts."""
        for result in results:
            self._update(_OPEN & (_POINTS.c.key == result.point.key), result=asdict(result))

    def _claim(self, points: Sequence[Point]) -> list[Point]:
        with self._begin() as database:
            known = database.execute(_POINTS.select().where(_POINTS.c.key.in_([point.key for point in points])))
            rows = {row.key: row for row in known}
        claimed: list[Point] = []
        for point in points:
            row = rows.get(point.key)
            if row is not None and not self._is_free(row):
                continue
            deaths = 0 if row is None else row.deaths + (row.worker is not None)
            if deaths >= _MOST_DEATHS:
                self.keep([Result(point, {}, f"{deaths} workers died of it")])
            elif not (deaths and claimed) and self._take(point, row, deaths):
                claimed.append(point)
                if deaths:
                    break
        return claimed

    def _is_free(self, row: sql.Row[Any]) -> bool:
        """Whether nobody does what a row says, or the heartbeat of whoever claimed it stopped."""
        if row.result is not None or row.worker == self.worker:
            return False
        now, sign = time.monotonic(), (row.worker, row.beats)
        known, since = self._seen.setdefault(row.key, (sign, now))
        if known != sign:
            self._seen[row.key] = (sign, now)
        return row.worker is None or (known == sign and now - since > _GRACE)

    def _take(self, point: Point, row: sql.Row[Any] | None, deaths: int) -> bool:
        """Claim a point, unless another worker was quicker."""
        if row is not None:
            unchanged = _OPEN & (_POINTS.c.key == point.key) & _POINTS.c.worker.is_not_distinct_from(row.worker)
            return self._update(unchanged, worker=self.worker, deaths=deaths, beats=row.beats + 1) > 0
        new = _POINTS.insert().values(key=point.key, worker=self.worker, deaths=0, beats=0)
        with self._errors(), suppress(sql.exc.IntegrityError), self._engine.begin() as database:
            database.execute(new)
            return True
        return False

    def _beat(self) -> None:
        while not self._stopped.wait(_BEAT):
            # The worker itself reports a storage that went away.
            with suppress(StorageError):
                self._update(self._mine, beats=_POINTS.c.beats + 1)

    def _update(self, where: sql.ColumnElement[bool], **values: Any) -> int:
        with self._begin() as database:
            return database.execute(_POINTS.update().where(where).values(**values)).rowcount

    @contextmanager
    def _begin(self) -> Iterator[sql.Connection]:
        with self._errors(), self._engine.begin() as database:
            yield database

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn what a storage raises that went away, is full or damaged into an error that says how to continue."""
        try:
            yield
        except (OSError, ImportError, sql.exc.SQLAlchemyError) as error:
            # Messages hold no password.
            shown = sql.make_url(self.place).render_as_string() if "://" in self.place else self.place
            if isinstance(error, ModuleNotFoundError):
                remedy = f"pip install {error.name}, or name another driver in the URL, such as postgresql+psycopg2://"
                raise StorageError(
                    f"the storage {shown} needs the Python package {error.name}, which is not installed: {remedy}"
                ) from error
            root = getattr(error, "orig", None) or error
            reason = " ".join(str(getattr(root, "strerror", None) or root).split()) or type(root).__name__
            raise StorageError(
                f"the storage {shown} cannot be used ({reason}); what was finished is kept there. Repeat the command "
                "once it is back"
            ) from error
