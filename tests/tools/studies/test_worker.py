"""Workers of one study: all that was to be found out is, once, whoever dies or goes away."""

from __future__ import annotations

import resource
import signal
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.studies import declared, stories_loader
from selfspec.errors import StorageError, StudyError
from selfspec.tools.studies import worker
from selfspec.tools.studies.estimate import estimate
from selfspec.tools.studies.journal import FILE, open_storage
from selfspec.tools.studies.plan import Plan
from selfspec.tools.studies.point import Point, Result
from selfspec.tools.studies.run import Finding, work_on
from selfspec.tools.studies.search.bayesian import quiet_optuna
from selfspec.tools.studies.subject import Subject
from selfspec.tools.studies.work import do
from selfspec.tools.studies.worker import Board, join

optuna = pytest.importorskip("optuna")

Load = Callable[[str], Subject]


@pytest.fixture(scope="module")
def load() -> Load:
    return stories_loader()


@pytest.fixture(scope="module")
def alone(load: Load, tmp_path_factory: pytest.TempPathFactory) -> Finding:
    """What one worker finds."""
    return work_on(declared(), load, tmp_path_factory.mktemp("alone"))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[list[Point]]:
    """The points that were really done, unit by unit."""
    units: list[list[Point]] = []

    def counted(points: Sequence[Point], *rest: Any) -> list[Result]:
        results = do(points, *rest)
        units.append(list(points))
        return results

    monkeypatch.setattr(worker, "do", counted)
    return units


def _best(finding: Finding) -> dict[str, Any]:
    best: dict[str, Any] = max(finding.table, key=lambda row: row["predicted_speedup"])
    return best


def _completed(place: str | Path, name: str = "study") -> Counter[str]:
    """How often each point was completed."""
    from optuna.trial import TrialState

    with quiet_optuna():
        study = optuna.load_study(study_name=name, storage=open_storage(place))
    trials = study.get_trials(states=(TrialState.COMPLETE,))
    return Counter(Point.from_dict(result["point"]).key for trial in trials for result in trial.user_attrs["results"])


def test_a_study_is_done_once(alone: Finding, load: Load, tmp_path: Path, done: list[list[Point]]) -> None:
    first = work_on(declared(), load, tmp_path)
    assert first.table == alone.table
    assert not first.failed
    # Exits and sublayers, at two temperatures and two lengths.
    assert len(first.table) == (4 + 10) * 2 * 2
    count = len(done)
    again = work_on(declared(), load, tmp_path)
    assert len(done) == count
    assert again.table == first.table
    # A longer study takes over what a shorter one found out.
    work_on(declared(drafts=["exits", "sublayers", "layers"]), load, tmp_path)
    assert sum(len(unit) for unit in done[count:]) == 5 * 2 + 0


def test_four_workers_of_which_one_dies_find_what_one_does(
    alone: Finding, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths: list[int] = []

    def mortal(points: Sequence[Point], *rest: Any) -> list[Result]:
        if points[0].kind == "estimate" and not deaths:
            deaths.append(threading.get_ident())
            # optuna handles neither, as it could not handle a kill.
            raise SystemExit
        return do(points, *rest)

    monkeypatch.setattr(worker, "do", mortal)
    found: list[Finding] = []

    def join_in() -> None:
        # Processes would not share what runs single layers of the model.
        own = replace(load("stories"))
        with suppress(SystemExit):
            found.append(work_on(declared(), lambda name: own, tmp_path))

    with quiet_optuna():
        workers = [threading.Thread(target=join_in) for _ in range(4)]
        for each in workers:
            each.start()
        for each in workers:
            each.join()
    assert len(deaths) == 1
    assert len(found) == 3
    assert [_best(each) for each in found] == [_best(alone)] * len(found)
    completed = _completed(tmp_path)
    assert set(completed.values()) == {1}
    assert completed.keys() == alone.results.keys()


def test_a_unit_that_kills_its_workers_is_given_up(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from optuna.trial import TrialState

    study = declared(drafts=["exits"], temperatures=[0.0])

    def deadly(points: Sequence[Point], *rest: Any) -> list[Result]:
        if any(point.content.get("draft") == "exit:2" for point in points):
            # As if killed: nothing is left behind but the trial.
            board = Board(tmp_path, study.name)
            running = board.study.get_trials(states=(TrialState.RUNNING,))
            board.study.tell(running[-1].number, state=TrialState.FAIL)
            raise SystemExit
        return do(points, *rest)

    monkeypatch.setattr(worker, "do", deadly)
    monkeypatch.setattr(worker, "_INTERRUPTED", "nothing of the sort")
    kills = 0
    while True:
        try:
            finding = work_on(study, load, tmp_path)
            break
        except (SystemExit, StorageError):
            kills += 1
            assert kills < 10
    assert [(each.point.content["draft"], each.error) for each in finding.failed] == [
        ("exit:2", "3 workers died of it")
    ]
    assert len([row for row in finding.table if row.get("error") is None]) == 3 * 2


def test_what_goes_wrong_with_a_point_is_its_result(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from selfspec.tools.studies import work

    def fails(subject: Subject, texts: Any, points: Sequence[Point]) -> list[dict[str, Any]]:
        if any(point.content["draft"] == "exit:3" for point in points):
            raise ZeroDivisionError("of all things")
        return estimate(subject, texts, points)

    monkeypatch.setattr(work, "estimate", fails)
    finding = work_on(declared(drafts=["exits"], temperatures=[0.0]), load, tmp_path)
    (failed,) = finding.failed
    assert failed.point.content["draft"] == "exit:3"
    assert "ZeroDivisionError: of all things (test_worker.py:" in str(failed.error)
    assert {row["draft"] for row in finding.table if row.get("error") is None} == {"exit:1", "exit:2", "exit:4"}


def test_an_interrupt_keeps_what_was_finished(load: Load, tmp_path: Path, done: list[list[Point]]) -> None:
    def interrupt(count: int, known: int) -> None:
        if count >= 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work_on(declared(), load, tmp_path, told=interrupt)
    assert sum(map(len, done)) >= 10
    work_on(declared(), load, tmp_path)
    assert set(Counter(point.key for unit in done for point in unit).values()) == {1}


@pytest.fixture
def full_disk() -> Iterator[Callable[[int], None]]:
    """No file may grow beyond a size, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_ends_the_work_and_keeps_what_was_finished(
    alone: Finding, load: Load, tmp_path: Path, full_disk: Callable[[int], None], done: list[list[Point]]
) -> None:
    full_disk(30_000)
    with pytest.raises(StorageError, match=r"File too large.*what was finished before is kept"):
        work_on(declared(), load, tmp_path)
    kept = _completed(tmp_path)
    assert len(kept) >= 3
    assert (tmp_path / FILE).read_bytes().endswith(b"\n")
    full_disk(resource.RLIM_INFINITY)
    count = len(done)
    finding = work_on(declared(), load, tmp_path)
    assert finding.table == alone.table
    assert not {point.key for unit in done[count:] for point in unit} & kept.keys()


def test_a_line_cut_off_in_the_journal_is_cut_away(alone: Finding, load: Load, tmp_path: Path) -> None:
    work_on(declared(drafts=["exits"]), load, tmp_path)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"op_code": 4, "work')
    assert work_on(declared(), load, tmp_path).table == alone.table


def test_a_storage_that_goes_away_is_said(load: Load, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nosuchdriver"):
        open_storage("nosuchdriver://user:secret@host/name")
    with pytest.raises(StorageError, match="cannot be used") as refused:
        open_storage(f"sqlite:///{tmp_path}/none/here.db")
    assert "secret" not in str(refused.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be used"):
        open_storage(tmp_path / "file")
    place, calls = tmp_path / "study", []

    def goes_away(count: int, known: int) -> None:
        calls.append(count)
        if len(calls) == 3:
            (place / FILE).unlink()

    with pytest.raises(StorageError, match="cannot be used"):
        work_on(declared(), load, place, told=goes_away)


def test_a_database_serves_as_well(alone: Finding, load: Load, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    assert work_on(declared(), load, tmp_path, url).table == alone.table
    assert set(_completed(url).values()) == {1}


@pytest.mark.parametrize("kept", ["journal", "database"])
def test_a_worker_killed_before_it_said_who_it_is_is_missed(
    alone: Finding, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    place = f"sqlite:///{tmp_path}/study.db" if kept == "database" else None
    monkeypatch.setattr(worker, "_NAMELESS", 0.5)
    # Nor did it live to give a heartbeat.
    monkeypatch.setattr(optuna.storages.RDBStorage, "record_heartbeat", lambda *_: None)
    claim = Board.claim
    deaths: list[int] = []

    def mortal(board: Board, trial: Any, name: str) -> None:
        if not deaths:
            deaths.append(trial.number)
            raise SystemExit
        claim(board, trial, name)

    monkeypatch.setattr(Board, "claim", mortal)
    with pytest.raises(SystemExit):
        work_on(declared(), load, tmp_path, place)
    assert work_on(declared(), load, tmp_path, place).table == alone.table
    assert set(_completed(place or tmp_path).values()) == {1}


def test_a_claimed_trial_has_a_heartbeat(tmp_path: Path) -> None:
    board = Board(f"sqlite:///{tmp_path}/study.db", "study")
    # Without the thread that would give heartbeats.
    with pytest.warns(UserWarning, match="Heartbeat"):
        trial = board.study.ask()
    board.claim(trial, "somebody")
    with sqlite3.connect(tmp_path / "study.db") as database:
        assert database.execute("select count(*) from trial_heartbeats").fetchone() == (1,)
    database.close()


def test_a_driver_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(StorageError, match="pip install psycopg2"):
        open_storage("postgresql+psycopg2://user@host/name")


def test_a_storage_of_another_study_is_refused(load: Load, tmp_path: Path) -> None:
    board = Board(tmp_path, "study")
    join(board, declared().to_dict())
    with pytest.raises(StudyError, match="other models"):
        join(board, {**declared().to_dict(), "models": ["others"]})
    with pytest.raises(StudyError, match="same weights"):
        Plan(declared(models=["a", "b"]), load)
