"""Medusa heads, mask rows and modules as they learn: what is trained is what an independent computation drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from helpers import lessons, published_heads, reference_heads, tiny
from selfspec import FixedLength
from selfspec.draft.heads.growing_head import HeadProposer
from selfspec.draft.heads.medusa import MedusaProposer
from selfspec.draft.heads.uno import UnoProposer
from selfspec.errors import HeadError, TrainingError
from selfspec.tools.train.corpus import Blocks, Split
from selfspec.tools.train.heads.lesson import HeadLesson
from selfspec.tools.train.heads.medusa import MedusaLesson
from selfspec.tools.train.heads.mtp import MtpLesson
from selfspec.tools.train.heads.uno import UnoLesson
from selfspec.tools.train.recipe import HeadRecipe

MEDUSA = HeadRecipe(kind="medusa", depth=3)
UNO = HeadRecipe(kind="uno", depth=2, rank=8)
MTP = HeadRecipe(kind="mtp", depth=3)
OPTIONS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
DENSE = ["qwen3_5_text", "ernie4_5_moe"]


def trained(lesson: HeadLesson, text: Blocks, steps: int) -> HeadLesson:
    lesson.model.double()
    lessons.learnt(lesson, text, steps)
    return lesson


def test_each_medusa_head_says_what_the_saved_one_drafts(model: PreTrainedModel, text: Blocks, tmp_path: Path) -> None:
    lesson = trained(MedusaLesson(model, MEDUSA, Split(text, text), 0), text, 3)
    lesson.save(tmp_path, torch.float64, {})
    weights = load_file(tmp_path / "model.safetensors")
    logits = reference_heads.medusa(model, weights, 1)
    lessons.assert_steps_are(lesson, text, MEDUSA.depth, logits)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 1)
    named = [f"{head}.{name}" for head in range(3) for name in ("0.linear.weight", "0.linear.bias", "1.weight")]
    assert sorted(weights) == sorted(named)


def test_medusa_heads_learn_and_draft(
    model: PreTrainedModel, text: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = ("agreement_1", "alpha_1", "alpha_3", "accepted_greedily")
    lesson = trained(MedusaLesson(model, MEDUSA, Split(text, text), 0), text, 0)
    found = lessons.assert_learns_and_drafts(lesson, text, "medusa", tmp_path, MedusaProposer, figures, monkeypatch)
    weights = load_file(tmp_path / "model.safetensors")
    reference_heads.assert_drafts_are(found, reference_heads.medusa(model, weights, 1))


def test_each_mask_says_what_the_saved_lora_drafts(model: PreTrainedModel, text: Blocks, tmp_path: Path) -> None:
    lesson = trained(UnoLesson(model, UNO, Split(text, text), 0), text, 3)
    lesson.model.eval()
    lesson.save(tmp_path, torch.float64, {})
    weights = load_file(tmp_path / "adapter_model.safetensors")
    assert any(weight.any() for name, weight in weights.items() if "lora_B" in name)
    lessons.assert_steps_are(lesson, text, UNO.depth, reference_heads.uno(model, weights, 1.0))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["uno_depth"]) == (8, 8, 2)
    assert {"q_proj", "down_proj"} <= set(config["target_modules"])


@pytest.mark.tools
def test_a_lora_learns_and_drafts(
    model: PreTrainedModel, text: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = ("agreement_1", "alpha_1", "alpha_2", "accepted_greedily")
    lesson = trained(UnoLesson(model, UNO, Split(text, text), 0), text, 0)
    found = lessons.assert_learns_and_drafts(
        lesson, text, "uno", tmp_path, UnoProposer, figures, monkeypatch, draft_length=FixedLength(2, nodes=8)
    )
    weights = load_file(tmp_path / "adapter_model.safetensors")
    reference_heads.assert_drafts_are(found, reference_heads.uno(model, weights, 1.0))


def said_by(model: Any) -> Blocks:
    ids = torch.cat([tiny.prompt(3, seed=seed).clamp(min=3) for seed in range(6)])
    return Blocks.of(model.generate(ids, max_new_tokens=13, **OPTIONS))


@pytest.mark.parametrize("kind", DENSE)
def test_each_unrolled_step_says_what_the_module_drafts(kind: str, tmp_path: Path) -> None:
    made = published_heads.mtp(tmp_path, kind)
    text = said_by(made.model)
    lesson = MtpLesson(made.model, MTP, Split(text, text), 0)
    lesson.model.double()
    logits = reference_heads.mtp(made.model, made.blocks, made.weights, kind)
    lessons.assert_steps_are(lesson, text, MTP.depth, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.tools
@pytest.mark.parametrize("kind", DENSE)
def test_a_module_learns_and_drafts_from_its_new_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, to = published_heads.mtp(tmp_path / "base", kind), tmp_path / "module"
    text = said_by(made.model)
    lesson, figures = MtpLesson(made.model, MTP, Split(text, text), 0), ("alpha_1", "alpha_3", "accepted_greedily")
    assert lessons.assert_learns_and_drafts(lesson, text, "mtp", to, HeadProposer, figures, monkeypatch)
    assert load_file(to / "model.safetensors").keys() == {*lesson.model.weights()}


def test_a_module_that_cannot_learn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadError, match="no module"):
        MtpLesson.check(tiny.llama())
    with pytest.raises(TrainingError, match="experts"):
        MtpLesson.check(published_heads.mtp(tmp_path / "experts", "glm4_moe").model)
    with pytest.raises(TrainingError, match="has 2 modules"):
        MtpLesson.check(published_heads.mtp(tmp_path / "several", "qwen3_5_text", modules=2).model)
