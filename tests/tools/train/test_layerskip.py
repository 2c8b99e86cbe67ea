"""Averages of a trained checkpoint and its base: every weight in between, measured, and nothing overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers import tiny
from helpers.stories import checkpoint_folder
from selfspec.errors import TrainingError
from selfspec.tools.train.layerskip import average
from selfspec.tools.train.recipe import Averaging

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
