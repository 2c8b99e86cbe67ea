"""Searches for skip sets: what they find, what they cost, and going on with them."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path as FilePath

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers.stories import checkpoint_folder
from selfspec.errors import DraftConfigError
from selfspec.measure.teacher_forced.figures import WrittenTexts
from selfspec.measure.teacher_forced.passes import LayerViews
from selfspec.model.registry import find_adapter
from selfspec.tools.studies.board import Board
from selfspec.tools.studies.prices import prices_by_weights
from selfspec.tools.studies.search import Found, SearchPlan, search
from selfspec.tools.studies.search.evaluate import Evaluator
from selfspec.tools.studies.skip_sets import Space
from selfspec.tools.studies.table import pareto_front


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint_folder())
    return loaded


@pytest.fixture(scope="module")
def texts(model: PreTrainedModel) -> WrittenTexts:
    torch.manual_seed(0)
    ids = torch.full((2, 1), 1)
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=True, top_k=0, eos_token_id=None
    )
    return WrittenTexts(written, 8, temperature=1.0)


def _evaluator(model: PreTrainedModel, texts: WrittenTexts, board: Board | None = None) -> Evaluator:
    adapter = find_adapter(model)
    return Evaluator(LayerViews(model, adapter), texts, prices_by_weights(model, adapter), (1, 2, 4), board=board)


def _space(model: PreTrainedModel, fewest: int, most: int) -> Space:
    return Space.of(model, find_adapter(model), fewest, most)


def test_in_two_thirds_of_the_evaluations_it_finds_the_best_pair(model: PreTrainedModel, texts: WrittenTexts) -> None:
    space = _space(model, 2, 2)
    everything = _evaluator(model, texts)
    everything.evaluate(map(frozenset, combinations(space.choices, 2)))
    best = max(everything.scores.values(), key=lambda score: score.speedup)
    found = search(_evaluator(model, texts), space, SearchPlan(evaluations=30))
    assert everything.evaluations == 45
    assert found.best == best
    assert len(found.scores) == 30


def test_the_front_holds_what_nothing_beats(model: PreTrainedModel, texts: WrittenTexts) -> None:
    found = search(_evaluator(model, texts), _space(model, 1, 5), SearchPlan(evaluations=40))
    assert len(set(found.methods)) >= 3
    for score in found.front:
        assert not any(
            other.alpha >= score.alpha and other.cost <= score.cost and other != score for other in found.scores
        )
    assert list(found.front) == pareto_front(found.scores, lambda score: (score.cost, score.alpha))
    assert found.best.speedup == max(score.speedup for score in found.scores)


def test_a_seed_gives_the_same_search_again(model: PreTrainedModel, texts: WrittenTexts) -> None:
    def once() -> Found:
        return search(_evaluator(model, texts), _space(model, 1, 4), SearchPlan(evaluations=12, seed=3))

    assert once() == once()


def test_an_interrupted_search_continues_and_repeats_nothing(
    model: PreTrainedModel, texts: WrittenTexts, tmp_path: FilePath
) -> None:
    space = _space(model, 1, 4)

    def interrupt(evaluations: int) -> None:
        if evaluations >= 16:
            raise KeyboardInterrupt

    with Board(tmp_path) as board, pytest.raises(KeyboardInterrupt):
        search(_evaluator(model, texts, board), space, SearchPlan(evaluations=24), interrupt)
    with Board(tmp_path) as board:
        seen: list[int] = []
        found = search(_evaluator(model, texts, board), space, SearchPlan(evaluations=24), seen.append)
        assert len(board.results()) == 24
    assert len(found.scores) == 24
    assert min(seen) >= 16
    assert found.methods.count("before") >= 16


def test_two_searches_share_the_work(model: PreTrainedModel, texts: WrittenTexts, tmp_path: FilePath) -> None:
    space, plan = _space(model, 1, 4), SearchPlan(evaluations=16)
    with Board(tmp_path) as one, Board(tmp_path) as other:
        mine, theirs = _evaluator(model, texts, one), _evaluator(model, texts, other)
        first = frozenset({space.choices[0]})
        with other.claimed([theirs._point(first)]):
            # Sets that another worker is at work on are left to it.
            assert mine.evaluate([first]) == []
        search(mine, space, plan)
        found = search(theirs, space, plan)
    assert found.methods == ("before",) * 16


def test_a_space_that_is_exhausted_ends_the_search(model: PreTrainedModel, texts: WrittenTexts) -> None:
    found = search(_evaluator(model, texts), _space(model, 1, 1), SearchPlan(evaluations=40))
    assert len(found.scores) == 10


@pytest.mark.parametrize("plan", [{"evaluations": 0}, {"draft_lengths": ()}, {"draft_lengths": (0,)}, {"reach": 0}])
def test_a_plan_that_cannot_be_is_refused(plan: dict[str, object]) -> None:
    with pytest.raises(DraftConfigError):
        SearchPlan(**plan)  # type: ignore[arg-type]
