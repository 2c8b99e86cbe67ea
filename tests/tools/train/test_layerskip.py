"""Averages of a checkpoint and its base, and the LayerSkip recipe against the formulas of the paper."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers import tiny
from helpers.stories import checkpoint_folder
from selfspec.errors import TrainingError
from selfspec.tools.train.layerskip import average
from selfspec.tools.train.recipe import Averaging, LayerSkipRecipe

FOLDER = checkpoint_folder()


@pytest.fixture
def trained(tmp_path: Path) -> str:
    """The checkpoint of the tests, a little moved."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(FOLDER)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    folder = tmp_path / "trained"
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((FOLDER / name).read_bytes())
    return str(folder)


def _averaging(held_out: Path | None = None) -> Averaging:
    return Averaging(base_share=0.25, held_out=held_out, held_out_blocks=2, length=16)


def test_every_weight_lies_between(trained: str, tmp_path: Path) -> None:
    text = tmp_path / "story.txt"
    text.write_text("Once upon a time there was a dog who liked to play with a big red ball in the park. " * 10)
    to = tmp_path / "average"
    report = average(trained, str(FOLDER), _averaging(text), to)
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (trained, FOLDER, to)]
    for one, other, between in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(between, 0.75 * one + 0.25 * other)
    assert report["after"]["held_out_loss"] < report["before"]["held_out_loss"]
    assert report["base"]["fingerprint"] != report["trained"]["fingerprint"]
    assert json.loads((to / "training.json").read_text()) == report
    with pytest.raises(TrainingError, match="finished training"):
        average(trained, str(FOLDER), _averaging(), to)


def test_without_a_text_nothing_is_measured(trained: str, tmp_path: Path) -> None:
    report = average(trained, str(FOLDER), _averaging(), tmp_path / "average")
    assert report["before"] == report["after"] == {}


def test_another_architecture_or_shape_is_refused(trained: str, tmp_path: Path) -> None:
    for number, other in enumerate((tiny.llama(), tiny.qwen2())):
        folder = tmp_path / str(number)
        other.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((FOLDER / name).read_bytes())
        with pytest.raises(TrainingError, match="differ in shape"):
            average(trained, str(folder), _averaging(), tmp_path / "average")
    assert not (tmp_path / "average").exists()


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 2.0])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(TrainingError, match="between 0 and 1"):
        Averaging(base_share=share)


def test_dropout_rises_exponentially_from_none_to_all_of_it() -> None:
    rates = LayerSkipRecipe(dropout=0.2).dropout_rates(12, step=0, steps=100)
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(0.2)
    # D(l) + 1 is a geometric series.
    ratios = [(after / 0.2 + 1) / (before / 0.2 + 1) for before, after in pairwise(rates)]
    assert ratios == pytest.approx([2 ** (1 / 11)] * 11)


def test_dropout_may_rise_over_the_training_as_well() -> None:
    recipe = LayerSkipRecipe(dropout=0.2, dropout_curriculum="exponential")
    last = [recipe.dropout_rates(4, step, 101)[-1] for step in (0, 50, 100)]
    assert last == pytest.approx([0, 0.2 * (math.sqrt(2) - 1), 0.2])


def test_rotation_teaches_every_exit_equally_often() -> None:
    recipe = LayerSkipRecipe(rotation=3)
    steps = [recipe.active(10, step, 100) for step in range(3)]
    assert steps == [[1, 4, 7], [2, 5, 8], [3, 6, 9]]
    assert recipe.active(10, 3, 100) == steps[0]


def test_gradual_curriculum_adds_exits_from_the_last_and_has_all_at_half_time() -> None:
    recipe = LayerSkipRecipe(curriculum="gradual")
    found = [recipe.active(5, step, 80) for step in (0, 10, 20, 30, 79)]
    assert found == [[4], [3, 4], [2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]


def test_weights_are_the_papers() -> None:
    recipe = LayerSkipRecipe(exit_scale=0.2)
    # The paper's e(l) with l = E - 1: 0.2 * (0 + ... + l), and for the last layer l + 0.2 * (0 + ... + (l - 1)).
    expected = [0.2 * 1, 0.2 * 6, 5 + 0.2 * 10]
    assert recipe.weights(6, [2, 4]) == pytest.approx([weight / sum(expected) for weight in expected])


def test_even_weights() -> None:
    assert LayerSkipRecipe(exit_scale=0.5, weighting="even").weights(12, [2, 4]) == pytest.approx([0.25, 0.25, 0.5])


def test_no_exit_leaves_the_full_model_alone() -> None:
    assert LayerSkipRecipe(exits=(3,), rotation=2).active(6, 1, 10) == []
    assert LayerSkipRecipe().weights(6, []) == [1.0]


@pytest.mark.parametrize(
    "recipe",
    [
        LayerSkipRecipe(exits=(0,)),
        LayerSkipRecipe(exits=(4,)),
        LayerSkipRecipe(dropout=1.0),
        LayerSkipRecipe(dropout=-0.1),
        LayerSkipRecipe(rotation=0),
    ],
)
def test_recipes_out_of_range_are_refused(recipe: LayerSkipRecipe) -> None:
    with pytest.raises(TrainingError):
        recipe.exits_of(4)
