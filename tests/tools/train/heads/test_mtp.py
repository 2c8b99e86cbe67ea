"""Modules for multi-token prediction as they learn further: what is trained is what drafts, and it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers import lessons, published_heads, reference_heads, tiny
from selfspec.draft.heads.growing_head import HeadProposer
from selfspec.errors import HeadError, TrainingError
from selfspec.tools.train.corpus import Blocks, Split
from selfspec.tools.train.heads.mtp import MtpLesson
from selfspec.tools.train.recipe import HeadRecipe

RECIPE = HeadRecipe(kind="mtp", depth=3)
OPTIONS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
DENSE = ["qwen3_5_text", "ernie4_5_moe"]


def said_by(model: Any) -> Blocks:
    ids = torch.cat([tiny.prompt(3, seed=seed).clamp(min=3) for seed in range(6)])
    return Blocks.of(model.generate(ids, max_new_tokens=13, **OPTIONS))


@pytest.mark.parametrize("kind", DENSE)
def test_each_unrolled_step_says_what_the_module_drafts(kind: str, tmp_path: Path) -> None:
    made = published_heads.mtp(tmp_path, kind)
    text = said_by(made.model)
    lesson = MtpLesson(made.model, RECIPE, Split(text, text), 0)
    lesson.model.double()
    logits = reference_heads.mtp(made.model, made.blocks, made.weights, kind)
    lessons.assert_steps_are(lesson, text, RECIPE.depth, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.tools
@pytest.mark.parametrize("kind", DENSE)
def test_a_module_learns_and_drafts_from_its_new_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, to = published_heads.mtp(tmp_path / "base", kind), tmp_path / "module"
    text = said_by(made.model)
    lesson, figures = MtpLesson(made.model, RECIPE, Split(text, text), 0), ("alpha_1", "alpha_3", "accepted_greedily")
    assert lessons.assert_learns_and_drafts(lesson, text, "mtp", to, HeadProposer, figures, monkeypatch)
    assert load_file(to / "model.safetensors").keys() == {*lesson.model.weights()}


def test_what_cannot_be_learnt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadError, match="no module"):
        MtpLesson.check(tiny.llama())
    with pytest.raises(TrainingError, match="experts"):
        MtpLesson.check(published_heads.mtp(tmp_path / "experts", "glm4_moe").model)
    with pytest.raises(TrainingError, match="has 2 modules"):
        MtpLesson.check(published_heads.mtp(tmp_path / "several", "qwen3_5_text", modules=2).model)
