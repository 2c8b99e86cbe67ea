"""What rounds a text implies, against generations of that text."""

from __future__ import annotations

import pytest
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import selfspec
from helpers.stories import PROMPTS, checkpoint_folder
from selfspec.draft import LayerSkip
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.measure.teacher_forced.figures import (
    DraftPath,
    TeacherForcedFigures,
    WrittenTexts,
    teacher_forced_figures,
)
from selfspec.measure.teacher_forced.passes import LayerViews
from selfspec.measure.teacher_forced.rounds import expected_rounds
from selfspec.model.registry import find_adapter

_NEW = 40
_DRAFTERS: tuple[LayerPathDrafter, ...] = (
    LayerSkip(attention=[2]),
    LayerSkip(mlp=[1], attention=[3]),
    selfspec.EarlyExit(3),
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
    model: PreTrainedModel, drafter: LayerPathDrafter, texts: WrittenTexts, reach: int
) -> TeacherForcedFigures:
    path = DraftPath(drafter.path(5))
    return teacher_forced_figures(LayerViews(model, find_adapter(model)), texts, [path], reach)[0]


@pytest.mark.parametrize("drafter", _DRAFTERS, ids=repr)
@pytest.mark.parametrize("length", [1, 3])
def test_greedy_rounds_are_those_of_the_generation(
    stories: PreTrainedModel, prompt: Tensor, drafter: LayerPathDrafter, length: int
) -> None:
    spec = selfspec.wrap(stories, draft=drafter, draft_length=length)
    output = spec.generate(prompt, max_new_tokens=_NEW, do_sample=False, eos_token_id=None)
    texts = WrittenTexts(output.sequences, prompt.shape[1], temperature=0.0)
    expected = expected_rounds(_figures(stories, drafter, texts, length), length)
    assert list(expected.judged) == output.stats.judged_per_depth
    assert list(expected.accepted) == output.stats.accepted_per_depth
    assert sum(expected.rounds) == output.stats.rounds
    assert expected.tokens == output.stats.new_tokens == _NEW


def test_sampled_rounds_are_those_of_generations_in_the_mean(stories: PreTrainedModel, prompt: Tensor) -> None:
    drafter, length, rows = _DRAFTERS[0], 3, 64
    spec = selfspec.wrap(stories, draft=drafter, draft_length=length, accept="token")
    many = prompt.repeat(rows, 1)
    output = spec.generate(many, max_new_tokens=_NEW, do_sample=True, top_k=0, eos_token_id=None, seed=1)
    others = selfspec.wrap(stories).generate(
        many, max_new_tokens=_NEW, do_sample=True, top_k=0, eos_token_id=None, seed=2
    )
    texts = WrittenTexts(others.sequences, prompt.shape[1], temperature=1.0)
    expected = expected_rounds(_figures(stories, drafter, texts, length), length)
    # About 1,500 and 900 draft tokens each: a standard error is 0.013 and 0.017.
    for position in range(length):
        found = output.stats.accepted_per_depth[position] / output.stats.judged_per_depth[position]
        assert expected.accepted[position] / expected.judged[position] == pytest.approx(found, abs=0.06)
    committed = expected.tokens * rows / sum(expected.rounds)
    assert committed == pytest.approx(output.stats.mean_accepted_length, rel=0.04)
