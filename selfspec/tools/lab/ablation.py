"""A whole study: what it asks of each model, in order, and its table."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby, product

from selfspec.accept import find_rule
from selfspec.environment import environment
from selfspec.errors import StudyError
from selfspec.tools.lab.drafts import content, is_judged_by_teacher_forcing, named_drafts
from selfspec.tools.lab.estimates import confirm, confirm_asked, count, estimate, estimate_asked
from selfspec.tools.lab.prices import Prices, costs_asked, find_costs
from selfspec.tools.lab.runs import Asked, Run, Runs
from selfspec.tools.lab.studied import StudiedModel, texts_asked, texts_of, write_texts
from selfspec.tools.lab.study import Study
from selfspec.tools.lab.table import Row, best_length, rows, speedups
from selfspec.tools.lab.work import price_work, text_work

# Drafts judged at once: enough to share what they begin with, few enough to lose little by an interruption.
_TOGETHER = 4

Progress = Callable[[int, int, float], None]
"""Called with how many points are done, how many there are to be, and what share of the work that is expected to be."""


@dataclass(frozen=True)
class Finding:
    """A study as it was declared, and everything that was found for it."""

    study: Study
    runs: Sequence[Run]

    @cached_property
    def table(self) -> list[Row]:
        """One row for each draft, text and draft length."""
        return rows(self.runs)

    @property
    def failed(self) -> list[Run]:
        """What went wrong."""
        return [run for run in self.runs if run.error is not None]


def untold(done: int, known: int, share: float) -> None:
    """Tell nobody how far work has come."""


def work_on(study: Study, load: Callable[[str], StudiedModel], runs: Runs, progress: Progress = untold) -> Finding:
    """Work on a study until all of it is found out, one model after the other.

    Args:
        study: what is declared.
        load: returns the model of a name.
        runs: where it is kept. The same call continues what was begun there.
        progress: called for each model.

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
    forced = {draft for draft, each in drafters.items() if is_judged_by_teacher_forcing(each, studied.adapter)}
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
    """Return what is judged at once: some drafts by teacher forcing, and each of the others by itself."""
    for by, group in groupby(asked, lambda each: each.under["by"]):
        some, size = list(group), 1 if by == "generation" else _TOGETHER
        yield from (some[start : start + size] for start in range(0, len(some), size))
