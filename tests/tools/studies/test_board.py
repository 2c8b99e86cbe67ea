"""The database of a study: every point is claimed once and kept once, whoever dies or goes away."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from selfspec.errors import StorageError
from selfspec.tools.studies.points import Point, Result

pytest.importorskip("sqlalchemy")

from selfspec.tools.studies import board as boards
from selfspec.tools.studies.board import FILE, Board

POINTS = [Point("estimate", {"draft": f"exit:{number}"}) for number in range(4)]


@pytest.fixture(params=["folder", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    return tmp_path if request.param == "folder" else f"sqlite:///{tmp_path}/shared.db"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without heartbeats for a moment counts as dead."""
    monkeypatch.setattr(boards, "_BEAT", 0.05)
    monkeypatch.setattr(boards, "_GRACE", 0.5)


def _result(point: Point, value: int = 0) -> Result:
    return Result(point, {"value": value}, None, 0.5, {"torch": "2"})


def test_what_is_kept_is_read_again(place: str | Path) -> None:
    with Board(place) as board, board.claimed(POINTS[:2]) as claimed:
        assert claimed == POINTS[:2]
        board.keep([_result(POINTS[0])])
        board.keep([_result(POINTS[0], 1)])
    with Board(place) as board:
        assert board.results() == {POINTS[0].key: _result(POINTS[0])}
        # What was not finished was given back.
        with board.claimed(POINTS) as claimed:
            assert claimed == POINTS[1:]


def test_no_two_workers_claim_one_point(place: str | Path) -> None:
    with Board(place) as one, Board(place) as other, one.claimed(POINTS[:3]), other.claimed(POINTS) as claimed:
        assert claimed == POINTS[3:]
        other.keep([_result(POINTS[3])])
        assert one.results().keys() == {POINTS[3].key}


def test_a_living_worker_is_not_robbed(place: str | Path, impatient: None) -> None:
    with Board(place) as one, Board(place) as other, one.claimed(POINTS):
        for _ in range(4):
            with other.claimed(POINTS) as claimed:
                assert not claimed
            time.sleep(0.3)


_KILLED = """
import os, signal, sys
from selfspec.tools.studies.board import Board
from selfspec.tools.studies.points import Point
points = [Point("estimate", {"draft": f"exit:{number}"}) for number in range(2)]
with Board(sys.argv[1]) as board, board.claimed(points):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_what_a_killed_worker_had_claimed_is_done_by_others_one_by_one(place: str | Path, impatient: None) -> None:
    assert subprocess.run([sys.executable, "-c", _KILLED, str(place)], check=False).returncode == -9
    done: list[Point] = []
    with Board(place) as board:
        begun = time.monotonic()
        while len(done) < 2 and time.monotonic() - begun < 20:
            with board.claimed(POINTS[:2]) as claimed:
                assert len(claimed) <= 1
                done += claimed
                board.keep([_result(point) for point in claimed])
            time.sleep(0.1)
    assert done == POINTS[:2]


def test_a_full_disk_is_said_and_what_was_finished_stays(tmp_path: Path) -> None:
    with Board(tmp_path) as board, board.claimed(POINTS) as claimed:
        board.keep([_result(claimed[0])])
        with board._engine.connect() as database:
            # SQLite takes the present size for a smaller one.
            database.exec_driver_sql("PRAGMA max_page_count = 1")
        long = Result(claimed[1], {"text": "x" * 1_000_000})
        with pytest.raises(StorageError, match=r"is full.*what was finished is kept there"):
            board.keep([long])
    with Board(tmp_path) as board:
        assert board.results().keys() == {POINTS[0].key}


def test_a_storage_that_cannot_be_used_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="nosuchdriver"):
        Board("nosuchdriver://user:secret@host/name")
    with pytest.raises(StorageError, match="cannot be used") as refused:
        Board(f"sqlite:///{tmp_path}/none/here.db")
    assert "secret" not in str(refused.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be used"):
        Board(tmp_path / "file")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / FILE).write_text("no database at all " * 100)
    with pytest.raises(StorageError, match="not a database"):
        Board(tmp_path / "damaged")
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(StorageError, match="pip install psycopg2"):
        Board("postgresql+psycopg2://user@host/name")


def test_a_storage_that_goes_away_is_said(tmp_path: Path) -> None:
    with Board(tmp_path) as board, board.claimed(POINTS) as claimed:
        (tmp_path / FILE).unlink()
        with pytest.raises(StorageError, match="cannot be used"):
            board.keep([_result(claimed[0])])
