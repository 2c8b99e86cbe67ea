"""The points of a study, stage by stage: texts and costs, then estimates, then the drafts confirmed by generation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from selfspec.errors import StudyError
from selfspec.tools.studies.confirm import measure_point
from selfspec.tools.studies.drafts import NamedDraft, named_drafts
from selfspec.tools.studies.estimate import estimate_point
from selfspec.tools.studies.models import StudiedModel, texts_point
from selfspec.tools.studies.points import Point, Result
from selfspec.tools.studies.prices import Prices, costs_point
from selfspec.tools.studies.study import Study
from selfspec.tools.studies.table import promised

# Drafts judged at once: enough to share what they begin with, few enough to lose little with a worker.
_TOGETHER = 8
_STAGES = {"costs": 0, "texts": 0, "estimate": 1, "measure": 2}


class StudyPoints:
    """Everything a study is to find out.

    Args:
        study: what is declared.
        load: returns the model of a name.

    Raises:
        StudyError: a draft does not fit a model, or two models are the same.
    """

    def __init__(self, study: Study, load: Callable[[str], StudiedModel]) -> None:
        self.study = study
        self._load = load
        self._names: dict[str, str] = {}
        self._texts: dict[str, Point] = {}
        self._costs: dict[str, Point] = {}
        self._estimates: dict[str, list[Point]] = {}
        for name in study.models:
            self._add(name, load(name))

    def model_of(self, texts_or_costs: Point) -> StudiedModel:
        """Return the model that writes these texts, or has these costs."""
        return self._load(self._names[texts_or_costs.content["base"]])

    def _add(self, name: str, studied: StudiedModel) -> None:
        study = self.study
        if studied.base in self._names:
            raise StudyError(f"models: {name} and {self._names[studied.base]} have the same weights; name one of them")
        self._names[studied.base] = name
        drafts = named_drafts(study.drafts, studied.model, studied.adapter, study.seeds[0])
        self._costs[studied.base] = costs_point(studied, drafts, study.pricing)
        # Drafts that begin alike side by side, since they share that work.
        ordered = sorted(drafts, key=lambda draft: (not draft.name.startswith("skip"), draft.name))
        for workload, temperature, seed in product(studied.prompts, study.temperatures, study.seeds):
            texts = texts_point(studied, workload, study.max_new_tokens, temperature, seed)
            # Greedy texts are the same whatever the seed.
            if texts.key not in self._texts:
                self._texts[texts.key] = texts
                self._estimates[texts.key] = [
                    estimate_point(draft, texts, study.draft_lengths, study.reach) for draft in ordered
                ]

    def all(self, results: Mapping[str, Result]) -> list[Point]:
        """Return every point of the study, as far as they are known: what to confirm follows from estimates.

        Args:
            results: what was found so far, by key.
        """
        estimates = [point for points in self._estimates.values() for point in points]
        return [*self._costs.values(), *self._texts.values(), *estimates, *self._confirmed(results)]

    def _confirmed(self, results: Mapping[str, Result]) -> Iterator[Point]:
        """Choose the drafts to confirm: half of them those that promise most, the others at random."""
        for texts in self._texts.values():
            costs = results.get(self._costs[texts.content["base"]].key)
            estimates = [results.get(point.key) for point in self._estimates[texts.key]]
            if costs is None or costs.error is not None or None in estimates:
                continue
            prices = Prices.of(costs)
            best = {each.point.key: promised(each, prices) for each in estimates if each and each.error is None}
            ranked = sorted(best, key=lambda key: (-best[key].speedup, key))
            count = min(self.study.confirm, len(ranked))
            chosen, others = ranked[: (count + 1) // 2], ranked[(count + 1) // 2 :]
            chosen += random.Random(texts.key).sample(others, count - len(chosen))
            for key, rule in product(chosen, self.study.accept):
                # Greedily all lossless rules are one.
                if texts.content["temperature"] or rule == self.study.accept[0]:
                    content = results[key].point.content
                    draft = NamedDraft(content["draft"], content["draft_content"])
                    yield measure_point(draft, texts, best[key].draft_length, rule)


def units(points: Sequence[Point]) -> Iterator[Sequence[Point]]:
    """Split the points of the first unfinished stage into what a worker does at once: several estimates on one text.

    Args:
        points: that are missing, at least one.
    """
    # Timings come first, while nothing else runs.
    stage = min(_STAGES[point.kind] for point in points)
    alike: dict[str, list[Point]] = {}
    for point in points:
        if _STAGES[point.kind] == stage:
            alike.setdefault(point.content["texts"] if point.kind == "estimate" else point.key, []).append(point)
    for group in alike.values():
        yield from (group[start : start + _TOGETHER] for start in range(0, len(group), _TOGETHER))
