"""How much work a study or a search is, by its sizes; and the sizes that a folder was begun with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from selfspec.measure.expected_time import FittedWork, Size, TokenTimes, Work, fit
from selfspec.tools.lab.prices import timed_paths
from selfspec.tools.lab.runs import Asked, Run, Runs
from selfspec.tools.lab.studied import StudiedModel
from selfspec.tools.lab.study import Study

# A draft step runs this much of the network, by and large; a confirmed token takes so many plain ones, the plain one
# beside it and the warm-up of both included. Timing takes so many for each draft.
_OF_A_PATH, _CONFIRMED, _TIMED = 0.7, 4.0, 260


def sizes_of(study: Study) -> dict[str, Size]:
    """Return the sizes that a study may shrink, from what it declares."""
    fewest = {"max_new_tokens": 16, "confirm": 2, "reach": 1}
    return {name: Size(getattr(study, name), min(few, getattr(study, name))) for name, few in fewest.items()}


def work(study: Study, studied: StudiedModel, drafts: int, sizes: Mapping[str, int]) -> Work:
    """Count the tokens of a study of so many drafts of each of its models, each as large as this one."""
    resized = resize(study, sizes)
    new, reach = resized.max_new_tokens, min(resized.reach, max(study.draft_lengths))
    total = Work()
    for prompts in studied.prompts.values():
        texts, read = len(prompts), sum(prompt.shape[1] for prompt in prompts)
        written = Work(new * texts, read)
        judged = Work(read=(read + new * texts) * (2 + drafts * reach * _OF_A_PATH))
        confirmed = Work(new * texts * _CONFIRMED, 4 * read).times(min(resized.confirm, drafts))
        total += (written + judged + confirmed).times(len(study.temperatures))
    priced = Work(_TIMED * (1 + len(timed_paths(studied.depth))) if study.pricing == "measured" else 0)
    return (total + priced).times(len(study.models))


def resize(study: Study, sizes: Mapping[str, int]) -> Study:
    """Return the study with other sizes; those that are none of its own are left."""
    own: dict[str, Any] = {name: size for name, size in sizes.items() if hasattr(study, name)}
    return replace(study, **own)


def fit_study(
    study: Study, free: Mapping[str, Size], drafts: int, studied: StudiedModel, minutes: float, runs: Runs
) -> FittedWork:
    """Choose the sizes of a study; where its folder was begun with some, these stay, so that what is known is used.

    Args:
        study: as declared.
        free: sizes that may shrink, by name; `evaluations` among them: drafts.
        drafts: of each model, unless `evaluations` says it.
        studied: the model that is timed.
        minutes: the most it may take.
        runs: where the study is kept.
    """
    asked = Asked("sizes", {"minutes": minutes, "names": sorted(free)})
    begun = runs[asked].found if asked in runs else {}
    bound = {name: Size(begun[name], begun[name]) if name in begun else size for name, size in free.items()}
    times = TokenTimes.measured(studied.model)
    fitted = fit(bound, lambda sizes: work(study, studied, sizes.get("evaluations", drafts), sizes), times, minutes)
    if asked not in runs:
        runs.keep([Run(asked, dict(fitted.sizes))])
    shrunk = {name: size for name, size in fitted.sizes.items() if size < free[name].usual}
    return replace(fitted, shrunk=shrunk)
