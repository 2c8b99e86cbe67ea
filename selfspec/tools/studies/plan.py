"""What is still to be found out of a study, given what was found: stage by stage, the same for every worker."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from selfspec.errors import StudyError
from selfspec.tools.studies.confirm import measure_point
from selfspec.tools.studies.drafts import NamedDraft, named_drafts
from selfspec.tools.studies.estimate import estimate_point
from selfspec.tools.studies.point import Point, Result
from selfspec.tools.studies.pricing import costs_point, prices_of
from selfspec.tools.studies.study import Study
from selfspec.tools.studies.subject import Subject
from selfspec.tools.studies.table import predicted
from selfspec.tools.studies.texts import texts_point

# Drafts judged at once: enough to share what they begin with, few enough to lose little with a worker.
_TOGETHER = 8


@dataclass(frozen=True)
class Unit:
    """Points that one worker does at once.

    Attributes:
        points: of one kind, model and text.
    """

    points: tuple[Point, ...]


class Plan:
    """A study, point by point.

    Args:
        study: what is declared.
        load: gives the model of a name.

    Raises:
        StudyError: a draft does not fit a model.
    """

    def __init__(self, study: Study, load: Callable[[str], Subject]) -> None:
        self.study = study
        self.texts: list[Point] = []
        self.costs: dict[str, Point] = {}
        self.estimates: list[Point] = []
        self.models: dict[str, str] = {}
        for model in study.models:
            self._add(model, load(model))

    def _add(self, model: str, subject: Subject) -> None:
        study = self.study
        if subject.base in self.models:
            raise StudyError(f"models: {model} and {self.models[subject.base]} have the same weights; name one of them")
        self.models[subject.base] = model
        drafts = named_drafts(study.drafts, subject.model, subject.adapter, study.seeds[0])
        self.costs[subject.base] = costs_point(subject, [draft.name for draft in drafts], study.pricing)
        for workload, temperature, seed in product(subject.prompts, study.temperatures, study.seeds):
            texts = texts_point(subject, workload, study.new_tokens, temperature, seed)
            if any(known.key == texts.key for known in self.texts):
                # Greedy texts are the same whatever the seed.
                continue
            self.texts.append(texts)
            self.estimates += [
                estimate_point(draft, texts, study.draft_lengths, study.reach) for draft in _alike(drafts)
            ]

    def stages(self, results: Mapping[str, Result]) -> Iterator[Sequence[Unit]]:
        """Units of each stage; a stage begins when all before it is found out.

        Args:
            results: by key, growing from one stage to the next.
        """
        # Timings first, while nothing else runs.
        yield [Unit((point,)) for point in [*self.costs.values(), *self.texts]]
        yield list(self._together(results))
        yield [Unit((point,)) for point in self._confirmed(results)]

    def points(self, results: Mapping[str, Result]) -> list[Point]:
        """All points of the study, as far as they can be told."""
        return [*self.costs.values(), *self.texts, *self.estimates, *self._confirmed(results)]

    def _together(self, results: Mapping[str, Result]) -> Iterator[Unit]:
        for texts in self.texts:
            missing = [
                point for point in self.estimates if point.content["texts"] == texts.key and point.key not in results
            ]
            for start in range(0, len(missing), _TOGETHER):
                yield Unit(tuple(missing[start : start + _TOGETHER]))

    def _confirmed(self, results: Mapping[str, Result]) -> Iterator[Point]:
        """The drafts to confirm: half of them those that promise most, the others at random."""
        for texts in self.texts:
            costs = results.get(self.costs[texts.content["base"]].key)
            judged = [
                (point, results[point.key])
                for point in self.estimates
                if point.content["texts"] == texts.key and point.key in results and results[point.key].error is None
            ]
            if costs is None or costs.error is not None:
                continue
            best = {point.key: predicted(result, prices_of(dict(costs.found))) for point, result in judged}
            ranked = sorted((point for point, _ in judged), key=lambda point: (-best[point.key].speedup, point.key))
            count = min(self.study.confirm, len(ranked))
            chosen, others = ranked[: (count + 1) // 2], ranked[(count + 1) // 2 :]
            chosen += random.Random(texts.key).sample(others, count - len(chosen))
            for point, rule in product(chosen, self.study.rules):
                # Greedily all lossless rules are one.
                if texts.content["temperature"] or rule == self.study.rules[0]:
                    draft = NamedDraft(point.content["draft"], point.content["draft_content"])
                    yield measure_point(draft, texts, best[point.key].draft_length, rule)


def _alike(drafts: Sequence[NamedDraft]) -> list[NamedDraft]:
    """Drafts in an order that puts those which begin alike side by side."""
    return sorted(drafts, key=lambda draft: (not draft.name.startswith("skip"), draft.name))
