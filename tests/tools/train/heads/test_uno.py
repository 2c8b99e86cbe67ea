"""A LoRA of mask rows as it learns: what is trained is what drafts, by a model that has it merged, and it learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from helpers import lessons, reference_heads
from selfspec import FixedLength
from selfspec.draft.heads.uno import UnoProposer
from selfspec.tools.train.corpus import Blocks, Split
from selfspec.tools.train.heads.uno import UnoLesson
from selfspec.tools.train.recipe import HeadRecipe

RECIPE = HeadRecipe(kind="uno", depth=2, rank=8)


def trained(model: PreTrainedModel, text: Blocks, steps: int) -> UnoLesson:
    lesson = UnoLesson(model, RECIPE, Split(text, text), 0)
    lesson.model.double()
    lessons.learnt(lesson, text, steps)
    lesson.model.eval()
    return lesson


def test_each_mask_says_what_the_saved_lora_drafts(model: PreTrainedModel, text: Blocks, tmp_path: Path) -> None:
    lesson = trained(model, text, 3)
    lesson.save(tmp_path, torch.float64, {})
    weights = load_file(tmp_path / "adapter_model.safetensors")
    assert any(weight.any() for name, weight in weights.items() if "lora_B" in name)
    lessons.assert_steps_are(lesson, text, RECIPE.depth, reference_heads.uno(model, weights, 1.0))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["uno_depth"]) == (8, 8, 2)
    assert {"q_proj", "down_proj"} <= set(config["target_modules"])


@pytest.mark.tools
def test_a_lora_learns_and_drafts(
    model: PreTrainedModel, text: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lesson, figures = trained(model, text, 0), ("agreement_1", "alpha_1", "alpha_2", "accepted_greedily")
    lesson.model.train()
    found = lessons.assert_learns_and_drafts(
        lesson, text, "uno", tmp_path, UnoProposer, figures, monkeypatch, draft_length=FixedLength(2, nodes=8)
    )
    weights = load_file(tmp_path / "adapter_model.safetensors")
    reference_heads.assert_drafts_are(found, reference_heads.uno(model, weights, 1.0))
