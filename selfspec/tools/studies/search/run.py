"""A whole search: skip sets by similarity and by importance first, then by small changes of the best ones known."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from selfspec.draft import LayerSkip
from selfspec.draft.skip_file import write_skip_file
from selfspec.environment import environment
from selfspec.errors import DraftConfigError
from selfspec.measure.teacher_forced.passes import TeacherForcedText
from selfspec.model.fingerprint import fingerprint
from selfspec.tools.studies.models import StudiedModel, texts_of, texts_point, write_texts
from selfspec.tools.studies.points import Point, Result
from selfspec.tools.studies.prices import Prices, costs_point, find_costs
from selfspec.tools.studies.search.evaluate import Evaluator, Score
from selfspec.tools.studies.search.similarity import influence, nested, sets_by_similarity
from selfspec.tools.studies.skip_sets import SkipSet, Space
from selfspec.tools.studies.study import Study
from selfspec.tools.studies.table import pareto_front

if TYPE_CHECKING:
    from selfspec.tools.studies.board import Board

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
class SearchPlan:
    """The budget of a search.

    Attributes:
        evaluations: skip sets to evaluate, in all.
        fewest: sublayers of a set, at least.
        most: at most; None: half of the network.
        draft_lengths: those to choose from.
        reach: positions of a draft that are told apart.
        seed: of all that is drawn.

    Raises:
        DraftConfigError: a number is out of range.
    """

    evaluations: int = 100
    fewest: int = 1
    most: int | None = None
    draft_lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8)
    reach: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.evaluations < 1:
            raise DraftConfigError(f"a search needs evaluations, at least 1; got {self.evaluations}")
        if not self.draft_lengths or min(self.draft_lengths) < 1:
            raise DraftConfigError(f"draft lengths must be at least 1, got {list(self.draft_lengths)}")
        if self.reach < 1:
            raise DraftConfigError(f"reach must be at least 1, got {self.reach}")


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        best: the set that promises the highest speed.
        front: sets that no other beats in both acceptance and cost, cheapest first.
        scores: of all sets evaluated, in order.
        methods: what proposed each set first.
        layer_passes: layers run to compare hidden states, in passes over one evaluation's text.
    """

    best: Score
    front: tuple[Score, ...]
    scores: tuple[Score, ...]
    methods: tuple[str, ...]
    layer_passes: float

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            "best": self.best.to_dict(),
            "front": [score.to_dict() for score in self.front],
            "evaluations": len(self.scores),
            "layer_passes": self.layer_passes,
            "scores": [
                {**score.to_dict(), "method": method} for score, method in zip(self.scores, self.methods, strict=True)
            ],
        }


def find(
    studied: StudiedModel,
    study: Study,
    plan: SearchPlan,
    place: str | Path | None = None,
    told: Callable[[int], None] = lambda evaluations: None,
) -> Found:
    """Search for the skip set of a model that promises the highest speed on texts that it writes itself.

    Args:
        studied: the model and its prompts; those of the first workload are used.
        study: texts, temperature (the first) and pricing.
        plan: the budget.
        place: folder or URL where the search is kept, to be continued or joined by others; None: nowhere.
        told: how many sets have been evaluated.

    Raises:
        DraftConfigError: there are no such skip sets.
        StorageError: the storage went away; what was evaluated is kept there.
    """
    from selfspec.tools.studies.board import Board

    space = Space.of(studied.model, studied.adapter, plan.fewest, plan.most)
    workload, temperature = next(iter(studied.prompts)), study.temperatures[0]
    point = texts_point(studied, workload, study.max_new_tokens, temperature, study.seeds[0])
    texts = texts_of(Result(point, write_texts(studied, point)), studied.model.device)
    costs = costs_point(studied, [], study.pricing)
    with nullcontext() if place is None else Board(place) as board:
        # All who join must weigh alike, so the first one's timings are everyone's.
        prices = Prices.of(_shared(board, costs, lambda: find_costs(studied, costs)))
        content = {"texts": point.key, "costs": costs.key}
        evaluator = Evaluator(studied.views, texts, prices, plan.draft_lengths, plan.reach, board, content)
        return search(evaluator, space, plan, told)


def search(
    evaluator: Evaluator, space: Space, plan: SearchPlan, told: Callable[[int], None] = lambda evaluations: None
) -> Found:
    """Search for the skip set that promises the highest speed.

    Args:
        evaluator: evaluates sets of the model.
        space: sets that may be chosen.
        plan: the budget.
        told: of progress, how many sets have been evaluated.
    """
    evaluator.recall()
    methods: dict[SkipSet, str] = dict.fromkeys(evaluator.scores, "before")

    def evaluate(method: str, sets: list[SkipSet], most: int) -> None:
        new = [each for each in dict.fromkeys(sets) if each not in evaluator.scores][: max(0, most)]
        methods.update(dict.fromkeys(evaluator.evaluate(new), method))
        told(evaluator.evaluations)

    def left() -> int:
        return plan.evaluations - evaluator.evaluations

    texts = evaluator.texts
    text = TeacherForcedText(evaluator.views, texts.ids[:_TEXTS, : texts.first + _TOKENS], texts.first)
    by_similarity = sets_by_similarity(text, space, evaluator.prices, _WIDTH)
    importance = influence(text, space)
    # Passes over single layers, in evaluations of the whole text.
    layer_passes = text.passes / texts.ids.numel()
    begin = max(1, plan.evaluations // 2) - evaluator.evaluations
    evaluate("similarity", _spread(by_similarity, max(1, begin * 2 // 3)), begin)
    evaluate("influence", _spread(nested(importance, space), max(0, begin // 3)), begin // 3)
    in_vain = 0
    while left() > 0 and in_vain < _PATIENCE:
        before = evaluator.evaluations
        evaluate("neighbour", _neighbours(evaluator, space, f"{plan.seed} {in_vain}", _BEST * (1 + in_vain)), left())
        in_vain = 0 if evaluator.evaluations > before else in_vain + 1
    chosen = [score for score in evaluator.scores.values() if space.holds(score.skipped)]
    return Found(
        max(chosen, key=lambda score: score.speedup),
        tuple(pareto_front(chosen, lambda score: (score.cost, score.alpha))),
        tuple(evaluator.scores.values()),
        tuple(methods.get(skipped, "others") for skipped in evaluator.scores),
        layer_passes,
    )


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
    best = found.best.to_dict()
    known = {
        "model": studied.name,
        "promises": best,
        "found": dict(about),
        "environment": environment(studied.model.device),
    }
    skip = LayerSkip(attention=best["attention"], mlp=best["mlp"])
    write_skip_file(skip, fingerprint(studied.model), file, known)


def _shared(board: Board | None, point: Point, find: Callable[[], dict[str, Any]]) -> Result:
    """Find something out, or wait until whoever else does has."""
    if board is None:
        return Result(point, find())
    while point.key not in (results := board.results()):
        with board.claimed([point]) as claim:
            if claim.points:
                board.keep([Result(point, find())])
            else:
                time.sleep(_PAUSE)
    return results[point.key]


def _neighbours(evaluator: Evaluator, space: Space, seed: str, count: int) -> list[SkipSet]:
    """Draw sets not evaluated yet, each one or two changes away from one of the best."""
    draws = Random(f"{seed} {evaluator.evaluations}")
    known = [score for score in evaluator.scores.values() if space.holds(score.skipped)]
    best = [score.skipped for score in sorted(known, key=lambda score: -score.speedup)[:count]]
    found: dict[SkipSet, None] = {}
    for _ in range(_TRIES):
        near = space.near(draws.choice(best), draws) if best else next(space.random(draws.getrandbits(32)))
        if draws.random() < _TWICE:
            near = space.near(near, draws)
        if near not in evaluator.scores:
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
