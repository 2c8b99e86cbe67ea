"""How much work a study or a search is, by its sizes; and the sizes that a folder was begun with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from selfspec.measure.expected_time import FittedWork, Size, TokenTimes, Work, fit
from selfspec.tools.lab.prices import timed_paths
from selfspec.tools.lab.runs import Asked, Run, Runs
from selfspec.tools.lab.studied import StudiedModel
from selfspec.tools.lab.study import Study

# In plain tokens: a draft step on average; a confirmed token, with the plain one beside it and both warm-ups; timing
# a draft; a counted token.
_OF_A_PATH, _CONFIRMED, _TIMED, _COUNTED = 0.7, 4.0, 260, 0.8


def sizes_of(study: Study) -> dict[str, Size]:
    """Return the sizes that a study may shrink, from what it declares."""
    fewest = {"max_new_tokens": 16, "confirm": 2, "reach": 1}
    return {name: Size(getattr(study, name), min(few, getattr(study, name))) for name, few in fewest.items()}


@dataclass(frozen=True)
class TextWork:
    """Work for the texts of a workload at one temperature.

    Attributes:
        texts: writing them.
        forced: judging a draft by teacher forcing.
        counted: judging one by generation.
        confirmed: confirming one.
    """

    texts: Work
    forced: Work
    counted: Work
    confirmed: Work


def text_work(study: Study, prompts: Sequence[Tensor]) -> TextWork:
    """Count the work for some prompts, `[1, tokens]` each."""
    count, read, lengths = len(prompts), sum(prompt.shape[1] for prompt in prompts), len(study.draft_lengths)
    new = study.max_new_tokens * count
    return TextWork(
        # What all drafts are compared with is read once for the texts.
        texts=Work(new, read + 2 * (read + new)),
        forced=Work(read=(read + new) * min(study.reach, max(study.draft_lengths)) * _OF_A_PATH),
        counted=Work(new * lengths * _COUNTED, read * lengths),
        confirmed=Work(new * _CONFIRMED, 4 * read),
    )


def price_work(study: Study, studied: StudiedModel) -> Work:
    """Count the work of timing costs."""
    return Work(_TIMED * (1 + len(timed_paths(studied.depth))) if study.pricing == "measured" else 0)


def work(study: Study, studied: StudiedModel, drafts: int, sizes: Mapping[str, int], counted: int = 0) -> Work:
    """Count the tokens of a study of a number of drafts of each of its models, each as large as this one.

    Of the drafts `counted` are judged by generation.
    """
    resized, total = resize(study, sizes), Work()
    for prompts in studied.prompts.values():
        each = text_work(resized, prompts)
        judged = each.forced.times(drafts - counted) + each.counted.times(counted)
        total += each.texts + judged + each.confirmed.times(min(resized.confirm, drafts))
    return (total.times(len(study.temperatures)) + price_work(study, studied)).times(len(study.models))


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
    runs: Runs,
    counted: int = 0,
) -> FittedWork:
    """Choose the sizes of a study; where its folder was begun with some, these stay, so that what is known is used.

    Args:
        study: as declared.
        free: sizes that may shrink, by name; `evaluations` among them: drafts.
        drafts: of each model, unless `evaluations` says it.
        studied: the model that is timed.
        minutes: the most it may take.
        runs: where the study is kept.
        counted: drafts that are judged by generation.
    """
    asked = Asked("sizes", {**asdict(studied.origin), "minutes": minutes, "names": sorted(free)}, studied.place)
    begun = runs[asked].found if asked in runs else {}
    bound = {name: Size(begun[name], begun[name]) if name in begun else size for name, size in free.items()}
    times = TokenTimes.measured(studied.model)
    fitted = fit(
        bound, lambda sizes: work(study, studied, sizes.get("evaluations", drafts), sizes, counted), times, minutes
    )
    if asked not in runs:
        runs.keep([Run(asked, dict(fitted.sizes))])
    shrunk = {name: size for name, size in fitted.sizes.items() if size < free[name].usual}
    return replace(fitted, shrunk=shrunk)
