"""Doing points: each by its kind, several drafts on one text at once; what fails is recorded, and the rest goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfspec.environment import environment
from selfspec.errors import SelfSpecError, StudyError
from selfspec.tools.studies.confirm import measure
from selfspec.tools.studies.estimate import estimate
from selfspec.tools.studies.point import Point, Result
from selfspec.tools.studies.pricing import find_costs
from selfspec.tools.studies.subject import Subject
from selfspec.tools.studies.texts import texts_of, write_texts


def do(
    points: Sequence[Point],
    load: Callable[[str], Subject],
    models: Mapping[str, str],
    results: Mapping[str, Result],
) -> list[Result]:
    """Find out some points of one kind, model and text.

    Args:
        points: what is to be found out.
        load: gives the model of a name.
        models: names by fingerprint.
        results: what they build on.

    Returns:
        As many results; an error of one point does not touch the others.
    """
    try:
        return _done(points, load, models, results)
    # Whatever a point does must not end the study; its error is its result.
    except Exception as error:
        if len(points) > 1:
            return [result for point in points for result in do([point], load, models, results)]
        return [Result(points[0], {}, _said(error), 0.0, {})]


def _done(
    points: Sequence[Point], load: Callable[[str], Subject], models: Mapping[str, str], results: Mapping[str, Result]
) -> list[Result]:
    begun = time.perf_counter()
    subject = load(_model_of(points[0], models, results))
    found = _found(points, subject, results)
    seconds = (time.perf_counter() - begun) / len(points)
    around = environment(subject.model.device)
    return [Result(point, each, None, seconds, around) for point, each in zip(points, found, strict=True)]


def _found(points: Sequence[Point], subject: Subject, results: Mapping[str, Result]) -> list[dict[str, Any]]:
    match points[0].kind:
        case "texts":
            return [write_texts(subject, point) for point in points]
        case "costs":
            return [find_costs(subject, point) for point in points]
        case "estimate":
            return estimate(subject, _texts(points[0], subject, results), points)
        case "measure":
            return [measure(subject, _texts(point, subject, results), point) for point in points]


def _texts(point: Point, subject: Subject, results: Mapping[str, Result]) -> Any:
    written = results[point.content["texts"]]
    if written.error is not None:
        raise StudyError(f"its texts could not be written: {written.error}")
    return texts_of(dict(written.found), written.point.content["temperature"], subject.model.device)


def _model_of(point: Point, models: Mapping[str, str], results: Mapping[str, Result]) -> str:
    content = point.content if "base" in point.content else results[point.content["texts"]].point.content
    return models[content["base"]]


def _said(error: Exception) -> str:
    said = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SelfSpecError) or error.__traceback__ is None:
        return said
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    return f"{said} ({Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno})"
