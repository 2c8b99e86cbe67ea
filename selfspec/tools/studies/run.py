"""A whole study: check it, join its storage, work, and give its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from selfspec.tools.studies.plan import Plan
from selfspec.tools.studies.point import Point, Result
from selfspec.tools.studies.requirements import require_packages
from selfspec.tools.studies.study import Study
from selfspec.tools.studies.subject import Subject, check_inputs, loader
from selfspec.tools.studies.table import Row, rows
from selfspec.tools.studies.worker import Board, join, work

LOCKS = "workers"


@dataclass(frozen=True)
class Finding:
    """What a study found.

    Attributes:
        study: as it was declared.
        points: all of it.
        results: what was found, by key.
    """

    study: Study
    points: Sequence[Point]
    results: Mapping[str, Result]

    @property
    def table(self) -> list[Row]:
        """One row for each draft, text, draft length and rule."""
        return rows(self.points, self.results)

    @property
    def failed(self) -> list[Result]:
        """Points that went wrong."""
        return [
            self.results[key] for point in self.points if (key := point.key) in self.results and self.results[key].error
        ]


def run_study(
    study: Study,
    to: Path,
    storage: str | None = None,
    device: str = "auto",
    told: Callable[[int, int], None] = lambda done, known: None,
) -> Finding:
    """Work on a study until all of it is found out; called several times at once, together.

    Args:
        study: what is declared.
        to: its folder. The same call goes on with what was begun there.
        storage: URL of a database to keep it in; None: a journal file in the folder.
        device: as in `torch.device`, or "auto".
        told: of progress: points found out, and all that are known of.

    Raises:
        SelfSpecError: the study cannot be done as declared; nothing was done.
        StorageError: its storage cannot be used, or went away; what was finished is kept there.
    """
    require_packages()
    check_inputs(study)
    return work_on(study, loader(study, device), to, storage, told)


def work_on(
    study: Study,
    load: Callable[[str], Subject],
    to: Path,
    storage: str | None = None,
    told: Callable[[int, int], None] = lambda done, known: None,
) -> Finding:
    """The same, of models from wherever they come."""
    plan = Plan(study, load)
    board = Board(storage or to, study.name)
    join(board, study.to_dict())
    results = work(board, plan, load, to / LOCKS, told)
    return Finding(study, plan.points(results), results)
