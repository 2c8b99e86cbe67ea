"""Searches for skip sets: what they find, what they cost, and going on with them."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path as FilePath

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers.stories import checkpoint_folder
from selfspec.errors import DraftConfigError
from selfspec.measure.forced_figures import Texts
from selfspec.measure.forced_passes import LayerViews
from selfspec.model.registry import find_adapter
from selfspec.tools.studies.search import Found, SearchPlan, search
from selfspec.tools.studies.search.evaluate import Evaluator, pareto_front
from selfspec.tools.studies.search.prices import prices_by_weights
from selfspec.tools.studies.search.space import Space

optuna = pytest.importorskip("optuna")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint_folder())
    return loaded


@pytest.fixture(scope="module")
def texts(model: PreTrainedModel) -> Texts:
    torch.manual_seed(0)
    ids = torch.full((2, 1), 1)
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=True, top_k=0, eos_token_id=None
    )
    return Texts(written, 8, temperature=1.0)


def _evaluator(model: PreTrainedModel, texts: Texts) -> Evaluator:
    adapter = find_adapter(model)
    return Evaluator(LayerViews(model, adapter), texts, prices_by_weights(model, adapter), (1, 2, 4))


def _space(model: PreTrainedModel, fewest: int, most: int) -> Space:
    return Space.of(model, find_adapter(model), fewest, most)


def test_in_two_thirds_of_the_evaluations_it_finds_the_best_pair(model: PreTrainedModel, texts: Texts) -> None:
    space = _space(model, 2, 2)
    everything = _evaluator(model, texts)
    scores = everything.evaluate(map(frozenset, combinations(space.choices, 2)))
    best = max(scores, key=lambda score: score.prediction.speedup)
    found = search(_evaluator(model, texts), space, SearchPlan(evaluations=30))
    assert len(scores) == 45
    assert found.best == best
    assert len(found.scores) == 30


def test_the_front_holds_what_nothing_beats(model: PreTrainedModel, texts: Texts) -> None:
    found = search(_evaluator(model, texts), _space(model, 1, 5), SearchPlan(evaluations=40))
    assert len(set(found.methods)) >= 3
    for score in found.front:
        assert not any(
            other.alpha >= score.alpha and other.cost <= score.cost and other != score for other in found.scores
        )
    assert list(found.front) == pareto_front(found.scores)
    assert found.best.prediction.speedup == max(score.prediction.speedup for score in found.scores)


def test_a_seed_gives_the_same_search_again(model: PreTrainedModel, texts: Texts) -> None:
    def once() -> Found:
        return search(_evaluator(model, texts), _space(model, 1, 4), SearchPlan(evaluations=12, seed=3))

    assert once() == once()


def test_an_interrupted_search_goes_on_and_repeats_nothing(
    model: PreTrainedModel, texts: Texts, tmp_path: FilePath
) -> None:
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal")))
    space = _space(model, 1, 4)

    def interrupt(evaluations: int) -> None:
        if evaluations >= 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(_evaluator(model, texts), space, SearchPlan(evaluations=24), storage, told=interrupt)
    evaluator = _evaluator(model, texts)
    seen: list[int] = []
    found = search(evaluator, space, SearchPlan(evaluations=24), storage, told=seen.append)
    assert len(found.scores) == 24
    assert min(seen) >= 12
    assert found.methods.count("before") >= 12


def test_a_space_that_is_exhausted_ends_the_search(model: PreTrainedModel, texts: Texts) -> None:
    found = search(_evaluator(model, texts), _space(model, 1, 1), SearchPlan(evaluations=40))
    assert len(found.scores) == 10


@pytest.mark.parametrize("plan", [{"evaluations": 0}, {"draft_lengths": ()}, {"draft_lengths": (0,)}, {"reach": 0}])
def test_a_plan_that_cannot_be_is_refused(plan: dict[str, object]) -> None:
    with pytest.raises(DraftConfigError):
        SearchPlan(**plan)  # type: ignore[arg-type]
