"""Searches for the skip set that promises the highest speed.

Skip sets by similarity and by importance first, then by small changes of the best ones known. Sets are estimated as in
a study: acceptance by teacher forcing, cost by price, speed by both.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from selfspec.draft import LayerSkip
from selfspec.draft.named import parse_draft
from selfspec.draft.skip_file import write_skip_file
from selfspec.environment import environment
from selfspec.measure.teacher_forced.passes import TeacherForcedText
from selfspec.model.fingerprint import fingerprint
from selfspec.tools.studies.board import Board
from selfspec.tools.studies.drafts import NamedDraft, draft_kind, skip_name, skip_set
from selfspec.tools.studies.estimate import estimate, estimate_point
from selfspec.tools.studies.models import StudiedModel, texts_of, texts_point, write_texts
from selfspec.tools.studies.points import Point, Result
from selfspec.tools.studies.prices import Prices, costs_point, find_costs
from selfspec.tools.studies.similarity import influence, nested, sets_by_similarity
from selfspec.tools.studies.skip_sets import SkipSet, Space
from selfspec.tools.studies.study import Study
from selfspec.tools.studies.table import Row, pareto_front, rows_of

# Ways that dynamic programming keeps for each amount of cost saved.
_WIDTH = 6
# Texts, and drafted tokens of each, that states are compared on; a few tell as much as many.
_TEXTS, _TOKENS = 2, 32
# Sets evaluated at once, since they share what they begin with; and how many best ones they are neighbours of.
_BATCH, _BEST = 4, 4
# How many neighbours are two changes away rather than one.
_TWICE = 0.3
# Neighbours drawn for a batch, and batches without a new set before the search counts as exhausted.
_TRIES, _PATIENCE = 64, 8
_PAUSE = 0.25


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        scores: all sets evaluated, in order: their rows of a study's table at their best draft lengths, with the
            `method` that proposed each first.
    """

    scores: Sequence[Row]

    @property
    def best(self) -> Row:
        """The set that promises the highest speed."""
        return max(self.scores, key=_speedup)

    @property
    def front(self) -> list[Row]:
        """Sets that no other beats in both acceptance and cost, cheapest first."""
        return pareto_front(self.scores, lambda row: (row["c"], row["alpha"]))

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {"best": self.best, "front": self.front, "evaluations": len(self.scores), "scores": self.scores}


class Evaluator:
    """Evaluates skip sets of a model on text that it writes itself, each set once, whoever searches.

    Args:
        studied: the model and its prompts; those of the first workload are used.
        study: texts, temperature and seed (the first of each), draft lengths, reach and pricing.
        space: sets that may be chosen.
        board: keeps what is found out, and shares it.

    Attributes:
        scores: of every set evaluated so far, by whomever: its row of a study's table, at its best draft length.
    """

    def __init__(self, studied: StudiedModel, study: Study, space: Space, board: Board) -> None:
        self.space = space
        self.scores: dict[SkipSet, Row] = {}
        self.studied = studied
        self._study = study
        self._board = board
        workload, temperature = next(iter(studied.prompts)), study.temperatures[0]
        texts = texts_point(studied, workload, study.max_new_tokens, temperature, study.seeds[0])
        costs = costs_point(studied, [], study.pricing)
        self._texts = self._shared(texts, write_texts)
        self.texts = texts_of(self._texts, studied.model.device)
        # All who join must weigh alike, so the first one's timings are everyone's.
        self.prices = Prices.of(self._shared(costs, find_costs))

    def recall(self) -> None:
        """Take over the sets that the board knows."""
        for result in self._board.results().values():
            if result.point.kind == "estimate" and result.error is None:
                draft = result.point.content["draft"]
                if draft_kind(draft) == "skip" and result.point.key == self._point(skip_set(draft)).key:
                    self._add(result)

    def evaluate(self, sets: Sequence[SkipSet]) -> list[SkipSet]:
        """Score some sets; those known cost nothing, and those that others are at work on are left to them.

        Returns:
            Those scored by this call.

        Raises:
            UnsupportedModelError: this architecture cannot be judged by teacher forcing.
        """
        self.recall()
        with self._board.claimed([self._point(each) for each in sets if each not in self.scores]) as claim:
            found = estimate(self.studied, self.texts, claim.points) if claim.points else []
            results = [Result(point, each) for point, each in zip(claim.points, found, strict=True)]
            self._board.keep(results)
        return [self._add(result) for result in results]

    def _point(self, skipped: SkipSet) -> Point:
        draft = NamedDraft(skip_name(skipped))
        return estimate_point(draft, self._texts.point, self._study.draft_lengths, self._study.reach)

    def _add(self, result: Result) -> SkipSet:
        skipped = skip_set(result.point.content["draft"])
        if skipped not in self.scores and self.space.holds(skipped):
            self.scores[skipped] = next(row for row in rows_of(result, self.prices) if row["best_length"])
        return skipped

    def _shared(self, point: Point, find: Callable[[StudiedModel, Point], dict[str, Any]]) -> Result:
        """Find something out, or wait until whoever else does has."""
        while point.key not in (results := self._board.results()):
            with self._board.claimed([point]) as claim:
                if claim.points:
                    self._board.keep([Result(point, find(self.studied, point))])
                else:
                    time.sleep(_PAUSE)
        return results[point.key]


def find(
    studied: StudiedModel,
    study: Study,
    space: Space,
    evaluations: int,
    place: str | Path | None = None,
    told: Callable[[int], None] = lambda evaluations: None,
) -> Found:
    """Search for the skip set of a model that promises the highest speed on texts that it writes itself.

    Args:
        studied: the model and its prompts; those of the first workload are used.
        study: texts, temperature and seed (the first of each), draft lengths, reach and pricing.
        space: sets that may be chosen.
        evaluations: skip sets to evaluate, in all.
        place: folder or URL where the search is kept, to be continued or joined by others; None: nowhere.
        told: how many sets have been evaluated.

    Raises:
        StorageError: the storage went away; what was evaluated is kept there.
    """
    with tempfile.TemporaryDirectory() as nowhere, Board(place or nowhere) as board:
        return search(Evaluator(studied, study, space, board), evaluations, study.seeds[0], told)


def search(
    evaluator: Evaluator, evaluations: int, seed: int = 0, told: Callable[[int], None] = lambda evaluations: None
) -> Found:
    """Search for the skip set that promises the highest speed.

    Args:
        evaluator: evaluates sets of the model.
        evaluations: skip sets to evaluate, in all.
        seed: of all that is drawn.
        told: of progress, how many sets have been evaluated.
    """
    evaluator.recall()
    space, scores = evaluator.space, evaluator.scores
    methods: dict[SkipSet, str] = dict.fromkeys(scores, "before")

    def evaluate(method: str, sets: Sequence[SkipSet], most: int) -> None:
        new = [each for each in dict.fromkeys(sets) if each not in scores][: max(0, most)]
        methods.update(dict.fromkeys(evaluator.evaluate(new), method))
        told(len(scores))

    texts = evaluator.texts
    text = TeacherForcedText(evaluator.studied.views, texts.ids[:_TEXTS, : texts.first + _TOKENS], texts.first)
    by_similarity = sets_by_similarity(text, space, evaluator.prices, _WIDTH)
    importance = influence(text, space)
    begin = max(1, evaluations // 2) - len(scores)
    evaluate("similarity", _spread(by_similarity, max(1, begin * 2 // 3)), begin)
    evaluate("influence", _spread(nested(importance, space), max(0, begin // 3)), begin // 3)
    in_vain = 0
    while len(scores) < evaluations and in_vain < _PATIENCE:
        before = len(scores)
        neighbours = _neighbours(evaluator, f"{seed} {in_vain}", _BEST * (1 + in_vain))
        evaluate("neighbour", neighbours, evaluations - before)
        in_vain = 0 if len(scores) > before else in_vain + 1
    return Found([{**row, "method": methods.get(skipped, "others")} for skipped, row in scores.items()])


def save(found: Found, studied: StudiedModel, file: Path, about: Mapping[str, Any]) -> None:
    """Write the best set, bound to the model's weights.

    Args:
        found: by a search.
        studied: the model.
        file: to write.
        about: how it was found.

    Raises:
        StorageError: the file cannot be written.
    """
    known = {"promises": found.best, "found": dict(about), "environment": environment(studied.model.device)}
    skip = parse_draft(found.best["draft"])
    assert isinstance(skip, LayerSkip)
    write_skip_file(skip, fingerprint(studied.model), file, known)


def _speedup(row: Row) -> float:
    speedup: float = row["predicted_speedup"]
    return speedup


def _neighbours(evaluator: Evaluator, seed: str, count: int) -> list[SkipSet]:
    """Draw sets not evaluated yet, each one or two changes away from one of the best."""
    space, scores = evaluator.space, evaluator.scores
    draws = Random(f"{seed} {len(scores)}")
    best = sorted(scores, key=lambda skipped: -_speedup(scores[skipped]))[:count]
    found: dict[SkipSet, None] = {}
    for _ in range(_TRIES):
        near = space.near(draws.choice(best), draws) if best else next(space.random(draws.getrandbits(32)))
        if draws.random() < _TWICE:
            near = space.near(near, draws)
        if near not in scores:
            found[near] = None
        if len(found) == _BATCH:
            break
    return list(found)


def _spread(sets: Sequence[SkipSet], count: int) -> list[SkipSet]:
    """Choose sets of as many sizes as there may be, the best of each size first."""
    by_size: dict[int, list[SkipSet]] = {}
    for each in sets:
        by_size.setdefault(len(each), []).append(each)
    rounds = max(map(len, by_size.values()), default=0)
    mixed = [by_size[size][turn] for turn in range(rounds) for size in sorted(by_size) if turn < len(by_size[size])]
    return mixed[:count]
