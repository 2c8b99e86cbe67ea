"""What rounds a text implies, against generations of that text."""

from __future__ import annotations

import pytest
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import selfspec
from helpers.stories import PROMPTS, checkpoint_folder
from selfspec.draft import LayerSkip
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.measure.own_text import Continuation
from selfspec.measure.teacher_forced import (
    DraftPath,
    LayerViews,
    TeacherForcedFigures,
    expected_rounds,
    teacher_forced_figures,
)
from selfspec.model.registry import find_adapter

_NEW = 40
_DRAFTERS: tuple[LayerPathDrafter, ...] = (
    LayerSkip(attention=[2]),
    LayerSkip(mlp=[1], attention=[3]),
    selfspec.drafts.EarlyExit(3),
)


@pytest.fixture(scope="module")
def stories() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint_folder())
    return model.double()


@pytest.fixture(scope="module")
def prompt() -> Tensor:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder())
    ids: Tensor = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    return ids


def _figures(
    model: PreTrainedModel, drafter: LayerPathDrafter, ids: Tensor, prompt: int, reach: int, temperature: float
) -> list[TeacherForcedFigures]:
    path, views = DraftPath(drafter.path(5)), LayerViews(model, find_adapter(model))
    texts = [Continuation(row, prompt) for row in ids.split(1)]
    return teacher_forced_figures(views, texts, [path], reach, temperature)[0]


@pytest.mark.parametrize("drafter", _DRAFTERS, ids=repr)
@pytest.mark.parametrize("length", [1, 3])
def test_greedy_rounds_are_those_of_the_generation(
    stories: PreTrainedModel, prompt: Tensor, drafter: LayerPathDrafter, length: int
) -> None:
    spec = selfspec.wrap(stories, draft=drafter, draft_length=length)
    output = spec.generate(prompt, max_new_tokens=_NEW, do_sample=False, eos_token_id=None)
    figures = _figures(stories, drafter, output.sequences, prompt.shape[1], length, 0.0)
    expected = expected_rounds(figures, length)
    assert list(expected.judged) == output.stats.judged_per_depth
    assert list(expected.accepted) == output.stats.accepted_per_depth
    assert sum(expected.rounds) == output.stats.rounds
    assert sum(expected.tokens) == output.stats.new_tokens == _NEW


@pytest.mark.tools
def test_sampled_rounds_are_those_of_generations_in_the_mean(stories: PreTrainedModel, prompt: Tensor) -> None:
    drafter, length, rows = _DRAFTERS[0], 3, 64
    spec = selfspec.wrap(stories, draft=drafter, draft_length=length, accept="token")
    many = prompt.repeat(rows, 1)
    output = spec.generate(many, max_new_tokens=_NEW, do_sample=True, top_k=0, eos_token_id=None, seed=1)
    others = selfspec.wrap(stories).generate(
        many, max_new_tokens=_NEW, do_sample=True, top_k=0, eos_token_id=None, seed=2
    )
    figures = _figures(stories, drafter, others.sequences, prompt.shape[1], length, 1.0)
    expected = expected_rounds(figures, length)
    # About 1,500 and 900 draft tokens each: a standard error is 0.013 and 0.017.
    for position in range(length):
        found = output.stats.accepted_per_depth[position] / output.stats.judged_per_depth[position]
        assert expected.accepted[position] / expected.judged[position] == pytest.approx(found, abs=0.06)
    committed = sum(expected.tokens) / sum(expected.rounds)
    assert committed == pytest.approx(output.stats.mean_accepted_length, rel=0.04)


def test_texts_of_several_lengths_are_what_each_is_alone(stories: PreTrainedModel, prompt: Tensor) -> None:
    output = selfspec.wrap(stories).generate(prompt, max_new_tokens=_NEW, do_sample=False, eos_token_id=None)
    path, views = DraftPath(_DRAFTERS[0].path(5)), LayerViews(stories, find_adapter(stories))
    ids, first = output.sequences, prompt.shape[1]
    # Of two prompts, ended early or not.
    texts = [Continuation(ids[:, : first + 9], first), Continuation(ids, first + 4), Continuation(ids, first)]
    together = teacher_forced_figures(views, texts, [path], 2)[0]
    for text, found in zip(texts, together, strict=True):
        (alone,) = teacher_forced_figures(views, [text], [path], 2)[0]
        assert found.agreed.shape == (2, text.ids.shape[1] - text.prompt)
        # The first tokens of the second copy mean nothing.
        assert found.agreed[0].tolist() == alone.agreed[0].tolist()
        assert found.agreed[1, 1:].tolist() == alone.agreed[1, 1:].tolist()
