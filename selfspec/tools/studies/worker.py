"""A worker of a study: claims units that wait in optuna's storage, does them, and leaves what it found there.

Units wait as enqueued trials, which optuna hands out one by one. Whoever joins may enqueue what is missing: of several
trials of one point the first counts, so nothing is done twice. Trials of a killed worker are failed, by optuna's
heartbeat on a database and by `Liveness` on a journal file, and their units are enqueued again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.errors import StudyError
from selfspec.tools.studies.journal import open_storage, storage_errors
from selfspec.tools.studies.liveness import Liveness
from selfspec.tools.studies.plan import Plan, Unit
from selfspec.tools.studies.point import Point, Result
from selfspec.tools.studies.search.bayesian import quiet_optuna
from selfspec.tools.studies.subject import Subject
from selfspec.tools.studies.work import do

if TYPE_CHECKING:
    import optuna

_POINTS, _RESULTS, _WORKER, _INTERRUPTED = "points", "results", "worker", "interrupted"
# A unit that killed so many workers is given up.
_MOST_DEATHS = 3
# A claimed trial whose worker does not say who it is counts as a dead one's after so many seconds.
_NAMELESS = 60.0
_PAUSE = 0.25


class Board:
    """The storage of a study, as its workers see it.

    Args:
        place: folder or URL, see `open_storage`.
        name: of the study there.

    Raises:
        StorageError: it cannot be used.
    """

    def __init__(self, place: str | Path, name: str) -> None:
        import optuna

        self.place = place
        self._storage = open_storage(place)
        with quiet_optuna(), storage_errors(place):
            self.study = optuna.create_study(
                storage=self._storage,
                study_name=name,
                load_if_exists=True,
                sampler=optuna.samplers.RandomSampler(seed=0),
            )

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """All trials, in order."""
        with storage_errors(self.place):
            return self.study.get_trials(deepcopy=False)

    def claim(self, trial: optuna.Trial, worker: str) -> None:
        """Say whose a trial is, once it will be noticed if the worker dies."""
        import optuna

        # Optuna's own thread gives heartbeats; a worker killed before the first of them would never be missed.
        if isinstance(self._storage, optuna.storages.RDBStorage):
            self._storage.record_heartbeat(trial._trial_id)
        trial.set_user_attr(_WORKER, worker)

    def results(self) -> dict[str, Result]:
        """What was found so far, by key; the first of a point counts."""
        found: dict[str, Result] = {}
        for trial in self.trials():
            for content in trial.user_attrs.get(_RESULTS, []) if trial.state.is_finished() else []:
                result = Result.from_dict(content)
                found.setdefault(result.point.key, result)
        return found


@dataclass
class _Standing:
    """Where the points of a study stand.

    Attributes:
        taken: points that wait, run or are done.
        waiting: trials that wait.
        running: trials that run.
        deaths: of workers, by point.
    """

    taken: set[str] = field(default_factory=set)
    waiting: int = 0
    running: list[optuna.trial.FrozenTrial] = field(default_factory=list)
    deaths: Counter[str] = field(default_factory=Counter)


def work(
    board: Board, plan: Plan, load: Callable[[str], Subject], locks: Path, told: Callable[[int, int], None]
) -> dict[str, Result]:
    """Do what is left of a study, together with whoever else works on it, until all of it is found out.

    Args:
        board: where it is kept.
        plan: what is to be found out.
        load: gives the model of a name.
        locks: folder of the workers' locks, for journal files.
        told: of progress: points found out, and all that are known of.

    Returns:
        What was found, by key.

    Raises:
        StorageError: the storage went away; what was finished is kept.
    """
    with Liveness(locks) as alive, quiet_optuna():
        worker = _Worker(board, plan, load, alive, told)
        results = board.results()
        for stage in range(3):
            results = worker.finish(stage)
        return results


class _Worker:
    def __init__(
        self,
        board: Board,
        plan: Plan,
        load: Callable[[str], Subject],
        alive: Liveness,
        told: Callable[[int, int], None],
    ) -> None:
        self._board, self._plan, self._load = board, plan, load
        self._alive, self._told = alive, told
        self._nameless_since: dict[int, float] = {}

    def finish(self, stage: int) -> dict[str, Result]:
        """Work until a stage is over."""
        import optuna

        while True:
            results = self._board.results()
            points = self._plan.points(results)
            self._told(sum(point.key in results for point in points), len(points))
            units = list(list(self._plan.stages(results))[stage])
            missing = [unit for unit in units if any(point.key not in results for point in unit.points)]
            if not missing:
                return results
            standing = self._standing()
            self._enqueue(missing, standing)
            if standing.waiting:
                with storage_errors(self._board.place):
                    self._board.study.optimize(self._objective, n_trials=1)
                continue
            with storage_errors(self._board.place):
                optuna.storages.fail_stale_trials(self._board.study)
            self._fail_dead(standing.running)
            time.sleep(_PAUSE)

    def _standing(self) -> _Standing:
        from optuna.trial import TrialState

        standing = _Standing()
        for trial in self._board.trials():
            keys = [Point.from_dict(each).key for each in trial.user_attrs.get(_POINTS, [])]
            if trial.state == TrialState.FAIL:
                if not trial.user_attrs.get(_INTERRUPTED):
                    standing.deaths.update(keys)
                continue
            if trial.state != TrialState.PRUNED:
                standing.taken.update(keys)
            standing.waiting += trial.state == TrialState.WAITING
            if trial.state == TrialState.RUNNING:
                standing.running.append(trial)
        return standing

    def _enqueue(self, units: Sequence[Unit], standing: _Standing) -> None:
        """Let wait what nobody has taken."""
        import optuna

        for unit in units:
            points = [point for point in unit.points if point.key not in standing.taken]
            given_up = [point for point in points if standing.deaths[point.key] >= _MOST_DEATHS]
            waiting = [point for point in points if point not in given_up]
            with storage_errors(self._board.place):
                if given_up:
                    results = [_failed(point, f"{_MOST_DEATHS} workers died of it") for point in given_up]
                    self._board.study.add_trial(
                        optuna.create_trial(
                            value=0.0, user_attrs={_POINTS: _dicts(given_up), _RESULTS: _dicts(results)}
                        )
                    )
                # One at a time, where one of them killed a worker before.
                risky = any(standing.deaths[point.key] for point in waiting)
                for together in [[point] for point in waiting] if risky else [waiting] if waiting else []:
                    self._board.study.enqueue_trial({}, user_attrs={_POINTS: _dicts(together)})
            standing.taken.update(point.key for point in points)
            standing.waiting += bool(waiting)

    def _objective(self, trial: optuna.Trial) -> float:
        import optuna

        given = trial.user_attrs.get(_POINTS)
        if given is None:
            # Someone else was quicker, and optuna made a trial of its own.
            raise optuna.TrialPruned
        self._board.claim(trial, self._alive.name)
        taken = self._taken_by_others(trial.number)
        points = [point for point in map(Point.from_dict, given) if point.key not in taken]
        if not points:
            raise optuna.TrialPruned
        try:
            results = do(points, self._load, self._plan.models, self._board.results())
        except BaseException:
            trial.set_user_attr(_INTERRUPTED, True)
            raise
        trial.set_user_attr(_RESULTS, _dicts(results))
        return float(len(results))

    def _taken_by_others(self, number: int) -> set[str]:
        """Points that another trial has done, or has taken before this one."""
        from optuna.trial import TrialState

        taken: set[str] = set()
        for trial in self._board.trials():
            ahead = trial.number < number and trial.state in (TrialState.RUNNING, TrialState.WAITING)
            if ahead or trial.state == TrialState.COMPLETE:
                taken.update(Point.from_dict(each).key for each in trial.user_attrs.get(_POINTS, []))
        return taken

    def _fail_dead(self, running: Sequence[optuna.trial.FrozenTrial]) -> None:
        """Fail the trials of workers that are no more, as far as optuna does not."""
        import optuna
        from optuna.trial import TrialState

        for trial in running:
            if not self._is_dead(trial):
                continue
            try:
                with storage_errors(self._board.place):
                    self._board.study.tell(trial.number, state=TrialState.FAIL)
            except optuna.exceptions.UpdateFinishedTrialError:
                continue

    def _is_dead(self, trial: optuna.trial.FrozenTrial) -> bool:
        worker = trial.user_attrs.get(_WORKER)
        if worker is None:
            # By this worker's clock, since those of others may tell another time.
            now = time.monotonic()
            return now - self._nameless_since.setdefault(trial.number, now) > _NAMELESS
        return "://" not in str(self._board.place) and self._alive.is_dead(worker)


def _failed(point: Point, error: str) -> Result:
    return Result(point, {}, error, 0.0, {})


def _dicts(items: Sequence[Point] | Sequence[Result]) -> list[dict[str, Any]]:
    return [item.to_dict() for item in items]


def join(board: Board, study: Mapping[str, Any]) -> None:
    """Make sure that a storage holds this study and no other of its name.

    Raises:
        StudyError: it holds one of other models.
    """
    with storage_errors(board.place):
        held = board.study.user_attrs.get("study")
        if held is None:
            board.study.set_user_attr("study", dict(study))
            return
    if held.get("models") != study.get("models"):
        raise StudyError(
            f"{board.place} holds a study {study.get('name')!r} of other models ({held.get('models')}); give another "
            "place or name"
        )
