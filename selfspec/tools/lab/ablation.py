"""Run a whole study: what it asks of each model, in order, and its table."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import groupby, product
from typing import Any

from torch import Tensor

from selfspec.accept import find_rule
from selfspec.errors import StudyError
from selfspec.measure.environment import environment
from selfspec.measure.expected_time import FittedWork, Size, TokenTimes, Work, fit
from selfspec.tools.lab.drafts import content, is_judged_by_teacher_forcing, named_drafts
from selfspec.tools.lab.estimates import confirm, confirm_asked, count, estimate, estimate_asked
from selfspec.tools.lab.runs import Asked, Run, Runs
from selfspec.tools.lab.study import StudiedModel, Study, texts_asked, texts_of, write_texts
from selfspec.tools.lab.table import Prices, Row, best_length, costs_asked, find_costs, rows, speedups, timed_paths

# Drafts judged at once: enough to share what they begin with, few enough to lose little by an interruption.
_TOGETHER = 4

Progress = Callable[[int, int, float], None]
"""Called with the points done, the points in all, and the share of the expected work that is done."""


@dataclass(frozen=True)
class Finding:
    """A study as declared, and everything found for it."""

    study: Study
    runs: Sequence[Run]

    @cached_property
    def table(self) -> list[Row]:
        """Rows of the table: one for each draft, text and draft length."""
        return rows(self.runs)

    @property
    def failed(self) -> list[Run]:
        """Runs that ended in an error."""
        return [run for run in self.runs if run.error is not None]


def untold(done: int, known: int, share: float) -> None:
    """Tell nobody how far work has come."""


def work_on(study: Study, load: Callable[[str], StudiedModel], runs: Runs, progress: Progress = untold) -> Finding:
    """Run a study, one model after the other; the same call continues what was begun in `runs`.

    Raises:
        StudyError: a draft does not fit a model, or two models are the same.
        StorageError: nothing can be written; what was finished is kept.
    """
    names: dict[str, str] = {}
    found: list[Run] = []
    for name in study.models:
        studied = load(name)
        same = names.setdefault(studied.origin.base, name)
        if same != name:
            raise StudyError(f"models: {name} and {same} have the same weights; name one of them")
        drafts = named_drafts(study.drafts, studied.model, studied.adapter, study.seed, studied.given)
        found += find_out(runs, study, studied, drafts, progress)
        # One model is in memory at a time.
        del studied
    return Finding(study, found)


def find_out(
    runs: Runs, study: Study, studied: StudiedModel, drafts: Mapping[str, str], progress: Progress = untold
) -> list[Run]:
    """Find out all that a study asks of some drafts of one model, except what is known.

    Costs come first, while nothing else runs; then texts, estimates, and confirmations of some of the drafts.
    """
    around = environment(studied.model.device)
    costs = costs_asked(studied, drafts, study.pricing)
    rule = content(studied.given.rules.get(study.accept) or find_rule(study.accept))
    drafters = {draft: studied.given.drafter(draft) for draft in drafts}
    taught = partial(is_judged_by_teacher_forcing, adapter=studied.adapter, depth=studied.depth)
    forced = {draft for draft, each in drafters.items() if taught(each)}
    grid = [*product(studied.prompts, study.temperatures)]
    # Drafts that begin alike side by side, since they share that work.
    ordered = sorted(drafts, key=lambda draft: (draft not in forced, not draft.startswith("skip"), draft))
    texts = [texts_asked(studied, workload, temperature, study) for workload, temperature in grid]
    asked = [costs, *texts]
    estimates = {
        each.key: [
            estimate_asked(draft, drafts[draft] + rule * (draft not in forced), each, study, draft not in forced)
            for draft in ordered
        ]
        for each in texts
    }
    confirmed = min(study.confirm, len(drafts))
    known = len(asked) + (len(ordered) + confirmed) * len(texts)
    works = [text_work(study, studied.prompts[workload]) for workload, _ in grid]
    shares = [price_work(study, studied).share, *(each.texts.share for each in works)]
    for each_work in works:
        shares += [(each_work.forced if draft in forced else each_work.counted).share for draft in ordered]
    shares += [each_work.confirmed.share for each_work in works for _ in range(confirmed)]

    def tell(done: int) -> None:
        progress(done, known, sum(shares[:done]) / max(sum(shares), 1e-9))

    tell(0)
    runs.find_out([costs], lambda some: [find_costs(studied, drafts, each) for each in some], around)
    for number, each in enumerate(texts, 1):
        runs.find_out([each], lambda some: [write_texts(studied, one) for one in some], around)
        tell(1 + number)
    done = len(asked)
    for each in texts:
        for part in _together(estimates[each.key]):
            runs.find_out(part, partial(_estimates, studied, runs[each]), around)
            done += len(part)
            tell(done)
        asked += estimates[each.key]
    for each in texts:
        for one in _confirmed(study, each, runs[costs], [runs[one] for one in estimates[each.key]]):
            asked.append(one)
            runs.find_out([one], partial(_confirmations, studied, runs[each]), around)
            done += 1
            tell(done)
    return [runs[each] for each in asked]


def _estimates(studied: StudiedModel, written: Run, asked: Sequence[Asked]) -> list[dict[str, object]]:
    texts, under = texts_of(written, studied.model.device), written.asked.under
    if asked[0].under["by"] == "generation":
        return [count(studied, texts, under["temperature"], under["new_tokens"], each) for each in asked]
    return estimate(studied, texts, under["temperature"], asked)


def _confirmations(studied: StudiedModel, written: Run, asked: Sequence[Asked]) -> list[dict[str, object]]:
    texts, under = texts_of(written, studied.model.device), written.asked.under
    return [confirm(studied, texts, under["temperature"], under["new_tokens"], each) for each in asked]


def _confirmed(study: Study, texts: Asked, costs: Run, estimates: Iterable[Run]) -> Iterator[Asked]:
    """Choose the drafts to confirm: half of them those that promise most, the others at random."""
    if costs.error is not None:
        return
    prices = Prices.of(costs)
    judged = {each.asked.key: each for each in estimates if each.error is None}
    promised = {key: speedups(each, prices) for key, each in judged.items()}
    ranked = sorted(promised, key=lambda key: (-promised[key][best_length(promised[key])].value, key))
    count = min(study.confirm, len(ranked))
    chosen, others = ranked[: (count + 1) // 2], ranked[(count + 1) // 2 :]
    chosen += random.Random(texts.key).sample(others, count - len(chosen))
    for key in chosen:
        yield confirm_asked(judged[key].asked, best_length(promised[key]))


def _together(asked: Sequence[Asked]) -> Iterator[Sequence[Asked]]:
    """Yield what is judged at once: some drafts by teacher forcing, and each of the others by itself."""
    for by, group in groupby(asked, lambda each: each.under["by"]):
        some, size = list(group), 1 if by == "generation" else _TOGETHER
        yield from (some[start : start + size] for start in range(0, len(some), size))


# In plain tokens: a draft step on average; a confirmed token, with the plain one beside it and both warm-ups; timing
# a draft; a counted token.
_OF_A_PATH, _CONFIRMED, _TIMED, _COUNTED = 0.7, 4.0, 260, 0.8


def sizes_of(study: Study) -> dict[str, Size]:
    """Return the sizes that a study may shrink, from what it declares."""
    fewest = {"max_new_tokens": 16, "confirm": 2, "reach": 1}
    return {name: Size(getattr(study, name), min(few, getattr(study, name))) for name, few in fewest.items()}


@dataclass(frozen=True)
class TextWork:
    """Work for the texts of a workload at one temperature: writing them, and judging or confirming one draft."""

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
    """Count the tokens of a study of `drafts` of each of its models, `counted` of them judged by generation."""
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

    `free` are the sizes that may shrink, `evaluations` (drafts) among them; `counted` drafts are judged by generation.
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
