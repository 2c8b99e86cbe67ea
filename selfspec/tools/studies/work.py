"""How much work a study or a search is, by its sizes; and the sizes that a folder was begun with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from selfspec.errors import StorageError
from selfspec.files.json_text import read_json
from selfspec.files.writing import write_json, writing
from selfspec.measure.expected_time import FittedWork, Size, TokenTimes, Work, fit
from selfspec.tools.studies.models import StudiedModel
from selfspec.tools.studies.study import Study

_FILE = "sizes.json"
# A draft step runs this much of the network, by and large; a confirmed token takes so many plain ones, the plain one
# beside it and the warm-up included. Timing takes so many for each draft, and for the paths that tell sublayers apart.
_OF_A_PATH, _CONFIRMED, _TIMED, _TELLING = 0.7, 2.5, 150, 5


@dataclass(frozen=True)
class _Sizes:
    """The sizes that a folder was begun with, by name, and the minutes that they were chosen for."""

    minutes: float
    sizes: dict[str, int]


def sizes_of(study: Study) -> dict[str, Size]:
    """Return the sizes that a study may shrink, from what it declares."""
    fewest = {"max_new_tokens": 16, "confirm": 2, "reach": 1}
    return {name: Size(getattr(study, name), min(few, getattr(study, name))) for name, few in fewest.items()}


def work(study: Study, drafts: int, sizes: Mapping[str, int], timed: int = 0) -> Work:
    """Count the tokens of a study of so many drafts of each of its models, some of which are timed by themselves."""
    resized = resize(study, sizes)
    grid = len(study.workloads) * len(study.temperatures) * len(study.seeds)
    new, texts = resized.max_new_tokens, study.texts
    written = Work(new * texts, study.prompt_tokens * texts)
    reach = min(resized.reach, max(study.draft_lengths))
    judged = Work(read=(study.prompt_tokens + new) * texts * (2 + drafts * reach * _OF_A_PATH))
    rules = len(study.accept) * (1 + len(study.nodes) * len(study.draft_lengths))
    confirmed = Work(new * texts * _CONFIRMED).times(min(resized.confirm, drafts) * rules)
    priced = Work(_TIMED * (_TELLING + timed) if study.pricing == "measured" else 0)
    return ((written + judged + confirmed).times(grid) + priced).times(len(study.models))


def resize(study: Study, sizes: Mapping[str, int]) -> Study:
    """Return the study with other sizes; those that are none of its own are left."""
    own: dict[str, Any] = {name: size for name, size in sizes.items() if hasattr(study, name)}
    return replace(study, **own)


def fit_study(
    study: Study,
    free: Mapping[str, Size],
    drafts: int,
    studied: StudiedModel,
    minutes: float,
    place: Path | None,
    timed: int = 0,
) -> FittedWork:
    """Choose the sizes of a study; where its folder was begun with some, these stay, so that what is known is used.

    Args:
        study: as declared.
        free: sizes that may shrink, by name; `evaluations` among them: drafts.
        drafts: of each model, unless `evaluations` says it.
        studied: the model that is timed.
        minutes: the most it may take.
        place: folder of the study; None: it is kept nowhere.
        timed: drafts that are timed by themselves.

    Raises:
        StorageError: the folder cannot be used.
    """
    times = TokenTimes.measured(studied.model)

    def of(sizes: Mapping[str, int]) -> Work:
        return work(study, sizes.get("evaluations", drafts), sizes, timed)

    if place is None:
        return fit(free, of, times, minutes)
    file = place / _FILE
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
        # Of several workers that begin at once, one chooses.
        with FileLock(file.with_suffix(".lock")):
            begun = {}
            if file.exists():
                kept = read_json(file, _Sizes, StorageError, "delete it, and sizes are chosen again")
                begun = {name: Size(size, size) for name, size in kept.sizes.items() if kept.minutes == minutes}
            fitted = fit({**free, **{name: size for name, size in begun.items() if name in free}}, of, times, minutes)
            write_json(file, asdict(_Sizes(minutes, dict(fitted.sizes))))
    shrunk = {name: size for name, size in fitted.sizes.items() if size < free[name].usual}
    return replace(fitted, shrunk=shrunk)
