"""The results of a study: every point is claimed once and kept once, whoever dies or goes away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from selfspec.errors import StorageError
from selfspec.tools.studies.board import FOLDER, Board
from selfspec.tools.studies.points import Point, Result

POINTS = [Point("estimate", {"draft": f"exit:{number}"}) for number in range(4)]


def _result(point: Point) -> Result:
    return Result(point, {"value": 1}, None, 0.5, {"torch": "2"})


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    board = Board(tmp_path)
    with board.claimed(POINTS[:2]) as claimed:
        assert claimed == POINTS[:2]
        board.keep([_result(POINTS[0])])
    again = Board(tmp_path)
    assert again.results() == {POINTS[0].key: _result(POINTS[0])}
    # What was not finished was given back.
    with again.claimed(POINTS) as claimed:
        assert claimed == POINTS[1:]


def test_no_two_workers_claim_one_point(tmp_path: Path) -> None:
    one, other = Board(tmp_path), Board(tmp_path)
    with one.claimed(POINTS[:3]), other.claimed(POINTS) as claimed:
        assert claimed == POINTS[3:]
        other.keep([_result(POINTS[3])])
        assert one.results().keys() == {POINTS[3].key}


_KILLED = """
import os, signal, sys
from selfspec.tools.studies.board import Board
from selfspec.tools.studies.points import Point
points = [Point("estimate", {"draft": f"exit:{number}"}) for number in range(2)]
with Board(sys.argv[1]).claimed(points) as claimed:
    assert len(claimed) == 2
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_what_a_killed_worker_had_claimed_is_done_by_others(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False).returncode == -9
    with Board(tmp_path).claimed(POINTS[:2]) as claimed:
        assert claimed == POINTS[:2]


def test_a_storage_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        Board(tmp_path / "file")
    board = Board(tmp_path)
    (tmp_path / FOLDER / "damaged.json").write_text("no result at all")
    with pytest.raises(StorageError, match=r"damaged.json cannot be read.*delete it"):
        board.results()


def test_a_storage_that_goes_away_is_said(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.folder.rmdir()
    board.folder.write_text("")
    with pytest.raises(StorageError, match="what was finished is kept there"):
        board.keep([_result(POINTS[0])])
