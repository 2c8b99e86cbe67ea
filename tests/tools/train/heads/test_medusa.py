"""Medusa heads as they learn: what is trained is what drafts, by an independent computation, and it learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from helpers import lessons, reference_heads
from selfspec.draft.heads.medusa import MedusaProposer
from selfspec.tools.train.corpus import Blocks, Split
from selfspec.tools.train.heads.medusa import MedusaLesson
from selfspec.tools.train.recipe import HeadRecipe

RECIPE = HeadRecipe(kind="medusa", depth=3)


def trained(model: PreTrainedModel, text: Blocks, steps: int) -> MedusaLesson:
    lesson = MedusaLesson(model, RECIPE, Split(text, text), 0)
    lesson.model.double()
    lessons.learnt(lesson, text, steps)
    return lesson


def test_each_medusa_head_says_what_the_saved_one_drafts(model: PreTrainedModel, text: Blocks, tmp_path: Path) -> None:
    lesson = trained(model, text, 3)
    lesson.save(tmp_path, torch.float64, {})
    weights = load_file(tmp_path / "model.safetensors")
    logits = reference_heads.medusa(model, weights, 1)
    lessons.assert_steps_are(lesson, text, RECIPE.depth, logits)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 1)
    named = [f"{head}.{name}" for head in range(3) for name in ("0.linear.weight", "0.linear.bias", "1.weight")]
    assert sorted(weights) == sorted(named)


def test_medusa_heads_learn_and_draft(
    model: PreTrainedModel, text: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = ("agreement_1", "alpha_1", "alpha_3", "accepted_greedily")
    found = lessons.assert_learns_and_drafts(
        trained(model, text, 0), text, "medusa", tmp_path, MedusaProposer, figures, monkeypatch
    )
    weights = load_file(tmp_path / "model.safetensors")
    reference_heads.assert_drafts_are(found, reference_heads.medusa(model, weights, 1))
