"""A whole study: its points, the work on them, alone or beside other processes, and its table."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

from selfspec.environment import environment
from selfspec.errors import SelfSpecError, StudyError
from selfspec.tools.studies.board import Board
from selfspec.tools.studies.drafts import named_drafts
from selfspec.tools.studies.judge import estimate, estimate_point, measure, measure_point
from selfspec.tools.studies.models import StudiedModel, texts_of, texts_point, write_texts
from selfspec.tools.studies.points import Point, Result
from selfspec.tools.studies.prices import Prices, costs_point, find_costs
from selfspec.tools.studies.study import Study
from selfspec.tools.studies.table import Row, rows, speedups

_PAUSE = 0.25
# Drafts judged at once: enough to share what they begin with, few enough to lose little with a worker.
_TOGETHER = 4
# Timings come first, while nothing else runs.
_STAGES = {"costs": 0, "texts": 0, "estimate": 1, "measure": 2}


@dataclass(frozen=True)
class Finding:
    """A study as it was declared, and everything that was found, by key."""

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
    progress: Callable[[int, int], None] = lambda done, known: None,
) -> Finding:
    """Work on a study until all of it is found out, one model after the other. Several calls at once share the work.

    Args:
        study: what is declared.
        load: returns the model of a name.
        place: folder to keep it in. The same call continues what was begun there.
        progress: called with the points of a model done, and all points.

    Raises:
        StudyError: a draft does not fit a model, or two models are the same.
        StorageError: the folder cannot be used; what was finished is kept there.
    """
    board = Board(place)
    names: dict[str, str] = {}
    results: dict[str, Result] = {}
    for name in study.models:
        studied = load(name)
        same = names.setdefault(studied.base, name)
        if same != name:
            raise StudyError(f"models: {name} and {same} have the same weights; name one of them")
        drafts = named_drafts(study.drafts, studied.model, studied.adapter, study.seeds[0])
        results |= find_out(board, study, studied, drafts, progress)
        # One model is in memory at a time.
        del studied
    return Finding(study, results)


def find_out(
    board: Board,
    study: Study,
    studied: StudiedModel,
    drafts: Mapping[str, str],
    progress: Callable[[int, int], None] = lambda done, known: None,
) -> dict[str, Result]:
    """Find out all that a study asks of some drafts of one model, except what is known or others are working on.

    `progress` is called with the points done, and all points.

    Returns:
        All results by key, once they are there.
    """
    while True:
        results = board.results()
        known: dict[str, Point] = {}
        for point in _points(study, studied, drafts, results):
            known.setdefault(point.key, point)
        missing = [point for key, point in known.items() if key not in results]
        progress(len(known) - len(missing), len(known))
        if not missing:
            return {key: results[key] for key in known}
        if not any(_work(board, unit, studied) for unit in _units(missing)):
            # Others are at work on all of it.
            time.sleep(_PAUSE)


def _points(
    study: Study, studied: StudiedModel, drafts: Mapping[str, str], results: Mapping[str, Result]
) -> Iterator[Point]:
    """Yield every point that is known so far: what to confirm follows from estimates. Greedily all seeds are one."""
    costs = costs_point(studied, drafts, study.pricing)
    yield costs
    # Drafts that begin alike side by side, since they share that work.
    ordered = sorted(drafts, key=lambda draft: (not draft.startswith("skip"), draft))
    for workload, temperature, seed in product(studied.prompts, study.temperatures, study.seeds):
        texts = texts_point(studied, workload, study.max_new_tokens, temperature, seed)
        estimates = [estimate_point(draft, drafts[draft], texts, study) for draft in ordered]
        yield texts
        yield from estimates
        if results.keys() >= {costs.key, *(point.key for point in estimates)} and results[costs.key].error is None:
            yield from _confirmed(study, texts, results[costs.key], [results[point.key] for point in estimates])


def _confirmed(study: Study, texts: Point, costs: Result, estimates: Sequence[Result]) -> Iterator[Point]:
    """Choose the drafts to confirm: half of them those that promise most, the others at random."""
    prices = Prices.of(costs)
    judged = {each.point.key: each for each in estimates if each.error is None}
    promised = {key: speedups(each, prices) for key, each in judged.items()}
    ranked = sorted(promised, key=lambda key: (-max(promised[key].values()), key))
    count = min(study.confirm, len(ranked))
    chosen, others = ranked[: (count + 1) // 2], ranked[(count + 1) // 2 :]
    chosen += random.Random(texts.key).sample(others, count - len(chosen))
    for key, rule in product(chosen, study.accept):
        # Greedily all lossless rules are one.
        if texts.content["temperature"] or rule == study.accept[0]:
            yield measure_point(judged[key].point, max(promised[key], key=promised[key].__getitem__), rule)
            for nodes, length in product(study.nodes, study.draft_lengths):
                if length <= nodes:
                    yield measure_point(judged[key].point, length, rule, nodes)


def _units(points: Sequence[Point]) -> Iterator[Sequence[Point]]:
    """Split the points of the first unfinished stage into what a worker does at once: several estimates on one text."""
    stage = min(_STAGES[point.kind] for point in points)
    now = [point for point in points if _STAGES[point.kind] == stage]
    for _, alike in groupby(now, lambda point: point.content["texts"] if point.kind == "estimate" else point.key):
        group = list(alike)
        yield from (group[start : start + _TOGETHER] for start in range(0, len(group), _TOGETHER))


def _work(board: Board, unit: Sequence[Point], studied: StudiedModel) -> bool:
    """Do some points, as far as nobody else does; return whether there were any."""
    with board.claimed(unit) as claimed:
        if claimed:
            board.keep(do(claimed, studied, board.results()))
    return bool(claimed)


def do(points: Sequence[Point], studied: StudiedModel, results: Mapping[str, Result]) -> list[Result]:
    """Find out some points of one kind and text; an error of one does not touch the others."""
    begun = time.perf_counter()
    try:
        found = _found(points, studied, results)
    # Whatever a point does must not end the study; its error is its result.
    except Exception as error:
        if len(points) > 1:
            return [result for point in points for result in do([point], studied, results)]
        message = " ".join(f"{type(error).__name__}: {error}".split())
        if not isinstance(error, SelfSpecError):
            last = traceback.extract_tb(error.__traceback__)[-1]
            message += f" ({Path(last.filename).name}:{last.lineno})"
        return [Result(points[0], {}, message)]
    seconds, around = (time.perf_counter() - begun) / len(points), environment(studied.model.device)
    return [Result(point, each, None, seconds, around) for point, each in zip(points, found, strict=True)]


def _found(points: Sequence[Point], studied: StudiedModel, results: Mapping[str, Result]) -> list[dict[str, Any]]:
    kind = points[0].kind
    if kind in ("costs", "texts"):
        return [(find_costs if kind == "costs" else write_texts)(studied, point) for point in points]
    texts = texts_of(results[points[0].content["texts"]], studied.model.device)
    return (
        estimate(studied, texts, points) if kind == "estimate" else [measure(studied, texts, each) for each in points]
    )
