"""What skip sets promise: acceptance by teacher forcing, cost by price, speed by both. No set is evaluated twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.measure.forced_figures import ForcedFigures, Texts, forced_figures
from selfspec.measure.forced_passes import LayerViews
from selfspec.measure.prefix_tree import Candidate
from selfspec.measure.rounds import expected_rounds
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.tools.studies.search.prices import Prediction, Prices, predict

SkipSet = frozenset[Sublayer]
"""Sublayers that a draft leaves out."""


@dataclass(frozen=True)
class Score:
    """What is known of one skip set.

    Attributes:
        skipped: the set.
        alpha: mean of 1 - TV, or of greedy agreement, at the first position of a draft.
        agreement: top-1 agreement there.
        cost: c of a draft step.
        prediction: best draft length and speed.
    """

    skipped: SkipSet
    alpha: float
    agreement: float
    cost: float
    prediction: Prediction

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            "attention": sorted(each.layer for each in self.skipped if each.part == Part.ATTENTION),
            "mlp": sorted(each.layer for each in self.skipped if each.part == Part.MLP),
            "alpha": self.alpha,
            "agreement": self.agreement,
            "cost": self.cost,
            "draft_length": self.prediction.draft_length,
            "speedup": self.prediction.speedup,
            "tokens_per_second": self.prediction.tokens_per_second,
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Score:
        """From what `to_dict` gave."""
        skipped = [Sublayer(layer, Part.ATTENTION) for layer in content["attention"]]
        skipped += [Sublayer(layer, Part.MLP) for layer in content["mlp"]]
        prediction = Prediction(content["draft_length"], content["speedup"], content["tokens_per_second"])
        return cls(frozenset(skipped), content["alpha"], content["agreement"], content["cost"], prediction)


class Evaluator:
    """Evaluates skip sets of one model on one text.

    Args:
        views: of the model.
        texts: to draft.
        prices: of the model.
        draft_lengths: those to choose from.
        reach: positions of a draft that are told apart.

    Attributes:
        scores: of every set evaluated so far.
    """

    def __init__(
        self, views: LayerViews, texts: Texts, prices: Prices, draft_lengths: Sequence[int], reach: int = 1
    ) -> None:
        self.views = views
        self.texts = texts
        self.prices = prices
        self.scores: dict[SkipSet, Score] = {}
        self._lengths = draft_lengths
        self._reach = reach

    @property
    def evaluations(self) -> int:
        """Sets evaluated so far."""
        return len(self.scores)

    def evaluate(self, sets: Iterable[SkipSet]) -> list[Score]:
        """Score some sets; those seen before cost nothing.

        Raises:
            UnsupportedModelError: this architecture cannot be read so.
        """
        wanted = list(sets)
        new = [each for each in dict.fromkeys(wanted) if each not in self.scores]
        if new:
            paths = [LayerPath.without(self.views.depth, each) for each in new]
            figures = forced_figures(self.views, self.texts, [Candidate(path) for path in paths], self._reach)
            for skipped, path, counted in zip(new, paths, figures, strict=True):
                self.scores[skipped] = self._score(skipped, path, counted)
        return [self.scores[each] for each in wanted]

    def _score(self, skipped: SkipSet, path: LayerPath, figures: ForcedFigures) -> Score:
        costs = self.prices.costs(path)
        tokens = {length: expected_rounds(figures, length).mean_accepted_length for length in self._lengths}
        prediction = predict(tokens, costs, self.prices.step_seconds)
        return Score(skipped, figures.alpha, figures.agreement, costs.draft, prediction)


def pareto_front(scores: Iterable[Score]) -> list[Score]:
    """Those that no other beats in both acceptance and cost, cheapest first."""
    front: list[Score] = []
    for each in sorted(scores, key=lambda score: (score.cost, -score.alpha)):
        if not front or each.alpha > front[-1].alpha:
            front.append(each)
    return front
