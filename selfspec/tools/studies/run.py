"""A whole study: check it, work on it with whoever else does, and give its table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.environment import environment
from selfspec.errors import SelfSpecError
from selfspec.tools.studies.confirm import measure
from selfspec.tools.studies.estimate import estimate
from selfspec.tools.studies.models import StudiedModel, texts_of, write_texts
from selfspec.tools.studies.points import Point, Result
from selfspec.tools.studies.prices import find_costs
from selfspec.tools.studies.stages import StudyPoints, units
from selfspec.tools.studies.study import Study
from selfspec.tools.studies.table import Row, rows

if TYPE_CHECKING:
    from selfspec.tools.studies.board import Board

# A point that killed so many workers is given up.
_MOST_DEATHS = 3
_PAUSE = 0.25


@dataclass(frozen=True)
class Finding:
    """What a study found.

    Attributes:
        study: as it was declared.
        results: everything that was found, by key.
    """

    study: Study
    results: Mapping[str, Result]

    @property
    def table(self) -> list[Row]:
        """One row for each draft, text, draft length and rule."""
        return rows(self.results)

    @property
    def failed(self) -> list[Result]:
        """Points that went wrong."""
        return [result for result in self.results.values() if result.error is not None]


def work_on(
    study: Study,
    load: Callable[[str], StudiedModel],
    place: str | Path,
    told: Callable[[int, int], None] = lambda done, known: None,
) -> Finding:
    """Work on a study until all of it is found out. Several calls at once share the work.

    Args:
        study: what is declared.
        load: returns the model of a name.
        place: folder, or URL of a database, to keep it in. The same call continues what was begun there.
        told: of progress: points found out, and all that are known of.

    Raises:
        SelfSpecError: the study cannot be done as declared; nothing was done.
        StorageError: its storage cannot be used, or went away; what was finished is kept there.
    """
    from selfspec.tools.studies.board import Board

    points = StudyPoints(study, load)
    with Board(place) as board:
        while True:
            results = board.results()
            known = points.all(results)
            missing = [point for point in known if point.key not in results]
            told(len(known) - len(missing), len(known))
            if not missing:
                return Finding(study, {point.key: results[point.key] for point in known})
            if not any(_work(board, unit, points.model_of) for unit in units(missing)):
                # Others are at work on all of it.
                time.sleep(_PAUSE)


def _work(board: Board, unit: Sequence[Point], model_of: Callable[[Point], StudiedModel]) -> bool:
    """Do some points, as far as nobody else does; return whether there were any."""
    with board.claimed(unit) as claim:
        if claim.deaths >= _MOST_DEATHS:
            board.keep([Result(point, {}, f"{claim.deaths} workers died of it") for point in claim.points])
        elif claim.points:
            board.keep(do(claim.points, model_of, board.results()))
    return bool(claim.points)


def do(
    points: Sequence[Point], model_of: Callable[[Point], StudiedModel], results: Mapping[str, Result]
) -> list[Result]:
    """Find out some points of one kind, model and text.

    Args:
        points: what is to be found out.
        model_of: returns the model of texts or costs.
        results: what they build on.

    Returns:
        As many results; an error of one point does not touch the others.
    """
    begun = time.perf_counter()
    first = points[0]
    written = results[first.content["texts"]] if "texts" in first.content else None
    try:
        studied = model_of(first if written is None else written.point)
        found = _found(points, studied, written)
        seconds = (time.perf_counter() - begun) / len(points)
        around = environment(studied.model.device)
        return [Result(point, each, None, seconds, around) for point, each in zip(points, found, strict=True)]
    # Whatever a point does must not end the study; its error is its result.
    except Exception as error:
        if len(points) > 1:
            return [result for point in points for result in do([point], model_of, results)]
        return [Result(first, {}, _message(error))]


def _found(points: Sequence[Point], studied: StudiedModel, written: Result | None) -> list[dict[str, Any]]:
    if points[0].kind == "costs":
        return [find_costs(studied, point) for point in points]
    if written is None:
        return [write_texts(studied, point) for point in points]
    texts = texts_of(written, studied.model.device)
    if points[0].kind == "estimate":
        return estimate(studied, texts, points)
    return [measure(studied, texts, point) for point in points]


def _message(error: Exception) -> str:
    message = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SelfSpecError) or error.__traceback__ is None:
        return message
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    return f"{message} ({Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno})"
