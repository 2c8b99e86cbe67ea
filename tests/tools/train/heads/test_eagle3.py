"""EAGLE-3 heads as they learn: what is trained is what drafts, by an independent computation, and it learns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import lessons, reference_heads, tiny
from selfspec.draft.heads.growing_head import HeadProposer
from selfspec.errors import TrainingError
from selfspec.model.identity import fingerprint
from selfspec.tools.train.corpus import Blocks, Split
from selfspec.tools.train.heads.eagle3 import Eagle3Lesson, usual_points
from selfspec.tools.train.recipe import HeadRecipe

RECIPE = HeadRecipe(kind="eagle3", depth=3, vocabulary=20)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.llama(num_hidden_layers=8, rms_norm_eps=1e-5)


def lesson_on(model: PreTrainedModel, text: Blocks, recipe: HeadRecipe = RECIPE) -> Eagle3Lesson:
    """A head whose weights are all other than those that it begins with."""
    lesson = Eagle3Lesson(model, recipe, Split(text, text), 0)
    lesson.model.double()
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in lesson.model.parameters():
            weight.add_(torch.randn(weight.shape, generator=drawn, dtype=weight.dtype) * 0.1)
    return lesson


def saved(lesson: Eagle3Lesson, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    lesson.save(folder, torch.float64, {})
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("vocabulary", [20, None])
def test_each_unrolled_step_says_what_the_saved_head_drafts(
    model: PreTrainedModel, text: Blocks, tmp_path: Path, vocabulary: int | None
) -> None:
    lesson = lesson_on(model, text, replace(RECIPE, vocabulary=vocabulary))
    weights, config = saved(lesson, tmp_path)
    if vocabulary is None:
        weights["d2t"] = torch.zeros(model.config.vocab_size, dtype=torch.long)
    logits = reference_heads.eagle3(model, weights, config, (2, 4, 5))
    kept = torch.arange(len(weights["d2t"])) + weights["d2t"]
    lessons.assert_steps_are(
        lesson, text, RECIPE.depth, lambda read, drafted: logits(read, drafted)[kept], rtol=1e-4, atol=1e-5
    )


def test_a_head_learns_and_drafts_with_what_it_learnt(
    model: PreTrainedModel, text: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lesson = lesson_on(model, text)
    figures = ("agreement_1", "agreement_3", "alpha_1", "alpha_3", "accepted_greedily")
    found = lessons.assert_learns_and_drafts(lesson, text, "eagle", tmp_path, HeadProposer, figures, monkeypatch, 80)
    weights, config = saved(lesson, tmp_path)
    reference_heads.assert_drafts_are(found, reference_heads.eagle3(model, weights, config, (2, 4, 5)))


def test_the_folder_is_of_the_layout_that_others_read(model: PreTrainedModel, text: Blocks, tmp_path: Path) -> None:
    weights, config = saved(lesson_on(model, text), tmp_path)
    layer = [
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        *(f"{name}norm" for name in ("hidden_", "input_layer", "post_attention_layer")),
    ]
    named = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *(f"layers.0.{name}.weight" for name in layer)}
    assert weights.keys() == named
    assert (weights["d2t"].dtype, weights["t2d"].dtype) == (torch.int64, torch.bool)
    tokens = torch.arange(20) + weights["d2t"]
    assert torch.equal(weights["t2d"].nonzero()[:, 0], tokens)
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["draft_vocab_size"] == 20
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    # Engines differ in what they take where it is not said.
    assert config["norm_before_residual"] is False
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    (method,) = config["speculators_config"]["proposal_methods"]
    assert (method["proposal_type"], method["speculative_tokens"]) == ("greedy", 3)
    inside = config["transformer_layer_config"]
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": model.config.vocab_size}
    assert inside.items() >= {"model_type": "llama", **sizes}.items()


def test_states_of_known_text_are_not_computed_again(model: PreTrainedModel, text: Blocks) -> None:
    lesson = lesson_on(model, text)
    first = lesson.loss(lesson.model, text, 0, 1)
    calls = []
    hook = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    again = lesson.loss(lesson.model, text.chosen(torch.arange(6).flip(0)), 0, 1)
    hook.remove()
    assert not calls
    torch.testing.assert_close(again, first)


def test_the_base_stays_as_it_is(text: Blocks) -> None:
    base = tiny.llama(num_hidden_layers=8).float()
    before = fingerprint(base)
    lesson = Eagle3Lesson(base, replace(RECIPE, vocabulary=None), Split(text, text), 0)
    optimizer = torch.optim.SGD(lesson.model.parameters(), 0.1)
    lesson.loss(lesson.model, text, 0, 1).backward()
    optimizer.step()
    assert fingerprint(base) == before


@pytest.mark.parametrize("architecture", sorted(tiny.BUILDERS))
def test_every_architecture_gets_a_head(text: Blocks, tmp_path: Path, architecture: str) -> None:
    base = tiny.BUILDERS[architecture]()
    ids = text.ids % base.config.vocab_size
    lesson = Eagle3Lesson(base, RECIPE, Split(Blocks.of(ids), Blocks.of(ids)), 0)
    loss = lesson.loss(lesson.model, Blocks.of(ids), 0, 1)
    loss.backward()
    learns = [weight for weight in lesson.model.parameters() if weight.requires_grad]
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in learns)
    rows = base.get_output_embeddings().weight[lesson.model.weights()["d2t"] + torch.arange(20)]
    torch.testing.assert_close(lesson.model.weights()["lm_head.weight"], rows.float())
    lesson.save(tmp_path, torch.float64, {})
    out = selfspec.wrap(base, f"eagle:{tmp_path}", draft_length=2).generate(ids[:1, :3], max_new_tokens=5)
    assert out.stats.drafted > 0


def test_usual_points() -> None:
    assert usual_points(30) == (2, 15, 27)
    assert [usual_points(depth) for depth in (1, 2, 4)] == [(0, 0, 0), (1, 1, 1), (1, 2, 3)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocabulary": 10**6}, "out of range"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"kind": "medusa"}, "whole vocabularies"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_what_cannot_be_learnt_is_refused(
    model: PreTrainedModel, text: Blocks, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(TrainingError, match=said):
        Eagle3Lesson(model, replace(RECIPE, **changes), Split(text, text), 0)
