"""A whole search: sets by similarity and by importance first, then Bayesian optimisation from there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from selfspec.measure.forced_passes import ForcedText
from selfspec.tools.studies.search.bayesian import open_study, optimise, quiet_optuna, recall, tell
from selfspec.tools.studies.search.evaluate import Evaluator, Score, SkipSet, pareto_front
from selfspec.tools.studies.search.plan import SearchPlan
from selfspec.tools.studies.search.similarity import influence, nested, sets_by_similarity
from selfspec.tools.studies.search.space import Space

if TYPE_CHECKING:
    import optuna

# Ways that dynamic programming keeps for each amount of cost saved.
_WIDTH = 6
# Texts, and drafted tokens of each, that states are compared on; a few tell as much as many.
_TEXTS, _TOKENS = 2, 32
# Single sublayers are evaluated one by one only where that leaves most of the budget.
_SINGLES_SHARE = 4


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
        """All of it, ready for JSON."""
        return {
            "best": self.best.to_dict(),
            "front": [score.to_dict() for score in self.front],
            "evaluations": len(self.scores),
            "layer_passes": self.layer_passes,
            "scores": [
                {**score.to_dict(), "method": method} for score, method in zip(self.scores, self.methods, strict=True)
            ],
        }


def search(
    evaluator: Evaluator,
    space: Space,
    plan: SearchPlan,
    storage: optuna.storages.BaseStorage | None = None,
    name: str = "search",
    told: Callable[[int], None] = lambda evaluations: None,
) -> Found:
    """Search for the skip set that promises the highest speed.

    Args:
        evaluator: evaluates sets of the model.
        space: sets that may be chosen.
        plan: the budget.
        storage: where the search is kept, to be gone on with or joined by others; None: nowhere.
        name: of the search there.
        told: of progress, how many sets have been evaluated.
    """
    methods: dict[SkipSet, str] = {}

    def evaluate(method: str, sets: list[SkipSet], most: int) -> None:
        new = [each for each in dict.fromkeys(sets) if each not in evaluator.scores][: max(0, most)]
        evaluator.evaluate(new)
        methods.update(dict.fromkeys(new, method))
        told(evaluator.evaluations)

    with quiet_optuna():
        study = open_study(storage, name, plan.seed)
        recall(study, evaluator)
        methods.update(dict.fromkeys(evaluator.scores, "before"))
        texts = evaluator.texts
        text = ForcedText(evaluator.views, texts.ids[:_TEXTS, : texts.first + _TOKENS], texts.first)
        by_similarity = sets_by_similarity(text, space, evaluator.prices, _WIDTH)
        importance = influence(text, space)
        # One evaluation of the whole text is what a layer pass is told in.
        layer_passes = text.passes / texts.ids.numel()
        begin = max(1, plan.evaluations // 2) - evaluator.evaluations
        evaluate("similarity", _spread(by_similarity, max(0, begin * 2 // 3)), begin)
        evaluate("influence", _spread(nested(importance, space), max(0, begin // 3)), begin // 3)
        if plan.evaluations >= _SINGLES_SHARE * len(space.choices):
            singles = {each: frozenset({each}) for each in space.choices}
            evaluate("single", list(singles.values()), plan.evaluations - evaluator.evaluations)
            measured = {
                each: -evaluator.scores[skipped].alpha
                for each, skipped in singles.items()
                if skipped in evaluator.scores
            }
            if len(measured) == len(singles):
                evaluate("greedy", nested(measured, space), plan.evaluations - evaluator.evaluations)
        tell(study, space, list(evaluator.scores.values()))
        optimise(study, evaluator, space, plan.evaluations, told)
    chosen = [score for score in evaluator.scores.values() if space.holds(score.skipped)]
    best = max(chosen, key=lambda score: score.prediction.speedup)
    return Found(
        best,
        tuple(pareto_front(chosen)),
        tuple(evaluator.scores.values()),
        tuple(methods.get(skipped, "bayesian") for skipped in evaluator.scores),
        layer_passes,
    )


def _spread(sets: list[SkipSet], count: int) -> list[SkipSet]:
    """Sets of as many sizes as there may be, the best of each size first."""
    by_size: dict[int, list[SkipSet]] = {}
    for each in sets:
        by_size.setdefault(len(each), []).append(each)
    rounds = max(map(len, by_size.values()), default=0)
    mixed = [by_size[size][turn] for turn in range(rounds) for size in sorted(by_size) if turn < len(by_size[size])]
    return mixed[:count]
