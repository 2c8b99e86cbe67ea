"""What skip sets promise: acceptance by teacher forcing, cost by price, speed by both. No set is evaluated twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from selfspec.measure.teacher_forced.figures import WrittenTexts, teacher_forced_figures
from selfspec.measure.teacher_forced.passes import LayerViews
from selfspec.measure.teacher_forced.paths import DraftPath
from selfspec.measure.teacher_forced.rounds import expected_rounds
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.tools.studies.points import Point, Result
from selfspec.tools.studies.prices import Prices, best_length
from selfspec.tools.studies.skip_sets import SkipSet

if TYPE_CHECKING:
    from selfspec.tools.studies.board import Board


@dataclass(frozen=True)
class Score:
    """What is known of one skip set.

    Attributes:
        skipped: the set.
        alpha: mean of 1 - TV, or of greedy agreement, at the first position of a draft.
        agreement: top-1 agreement there.
        cost: c of a draft step.
        draft_length: gamma that promises most.
        speedup: predicted with it, against plain decoding.
        tokens_per_second: the same by the measured step; None where none was measured.
    """

    skipped: SkipSet
    alpha: float
    agreement: float
    cost: float
    draft_length: int
    speedup: float
    tokens_per_second: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        figures = {name: value for name, value in vars(self).items() if name != "skipped"}
        return {**layers_of(self.skipped), **figures}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Score:
        """Read what `to_dict` returned."""
        figures = dict(content)
        skipped = [Sublayer(layer, Part.ATTENTION) for layer in figures.pop("attention")]
        skipped += [Sublayer(layer, Part.MLP) for layer in figures.pop("mlp")]
        return cls(frozenset(skipped), **figures)


def layers_of(skipped: SkipSet) -> dict[str, list[int]]:
    """Return the layers whose attention and whose MLP a set leaves out."""
    return {part.name.lower(): sorted(each.layer for each in skipped if each.part == part) for part in Part}


class Evaluator:
    """Evaluates skip sets of one model on one text.

    Args:
        views: of the model.
        texts: to draft.
        prices: of the model.
        draft_lengths: those to choose from.
        reach: positions of a draft that are told apart.
        board: keeps scores, and shares them with others who search; None: nobody does.
        content: what distinguishes this search from others on the board.

    Attributes:
        scores: of every set evaluated so far, by whomever.
    """

    def __init__(
        self,
        views: LayerViews,
        texts: WrittenTexts,
        prices: Prices,
        draft_lengths: Sequence[int],
        reach: int = 1,
        board: Board | None = None,
        content: Mapping[str, Any] | None = None,
    ) -> None:
        self.views = views
        self.texts = texts
        self.prices = prices
        self.scores: dict[SkipSet, Score] = {}
        self._lengths = draft_lengths
        self._reach = reach
        self._board = board
        self._content = {**(content or {}), "draft_lengths": list(draft_lengths), "reach": reach}
        self.recall()

    @property
    def evaluations(self) -> int:
        """Sets evaluated so far."""
        return len(self.scores)

    def recall(self) -> None:
        """Take over what the board knows of this search."""
        for result in [] if self._board is None else self._board.results().values():
            if result.point.kind == "skip set" and self._content.items() <= result.point.content.items():
                score = Score.from_dict(result.found)
                self.scores.setdefault(score.skipped, score)

    def evaluate(self, sets: Iterable[SkipSet]) -> list[SkipSet]:
        """Score some sets; those known cost nothing, and those that others are at work on are left to them.

        Returns:
            Those scored by this call.

        Raises:
            UnsupportedModelError: this architecture cannot be judged by teacher forcing.
        """
        self.recall()
        new = {self._point(each).key: each for each in sets if each not in self.scores}
        if self._board is None:
            return self._score(list(new.values()))
        with self._board.claimed([self._point(each) for each in new.values()]) as claim:
            mine = self._score([new[point.key] for point in claim.points])
            self._board.keep([Result(self._point(each), self.scores[each].to_dict()) for each in mine])
            return mine

    def _point(self, skipped: SkipSet) -> Point:
        return Point("skip set", {**self._content, **layers_of(skipped)})

    def _score(self, sets: list[SkipSet]) -> list[SkipSet]:
        if not sets:
            return sets
        paths = [LayerPath.without(self.views.depth, each) for each in sets]
        judged = teacher_forced_figures(self.views, self.texts, [DraftPath(path) for path in paths], self._reach)
        for skipped, path, figures in zip(sets, paths, judged, strict=True):
            costs = self.prices.costs(path)
            tokens = {length: expected_rounds(figures, length).mean_accepted_length for length in self._lengths}
            best, step = best_length(tokens, costs), self.prices.step_seconds
            speed = None if step is None else best.speedup / step
            self.scores[skipped] = Score(
                skipped, figures.alpha, figures.agreement, costs.draft, best.draft_length, best.speedup, speed
            )
        return sets
