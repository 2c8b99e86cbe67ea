"""Draft heads of every kind as they learn: what is trained is what an independent computation drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import published_heads, reference_heads, tiny
from selfspec import FixedLength
from selfspec.draft.heads.medusa import MedusaProposer
from selfspec.draft.heads.pairs import PairProposer
from selfspec.draft.heads.uno import UnoProposer
from selfspec.errors import HeadError, TrainingError
from selfspec.model.identity import fingerprint
from selfspec.tools.train.corpus import Blocks, Split
from selfspec.tools.train.heads.eagle3 import Eagle3Lesson
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


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.llama(num_hidden_layers=8, rms_norm_eps=1e-5)


@pytest.fixture(scope="module")
def text(model: PreTrainedModel) -> Blocks:
    ids = torch.cat([tiny.prompt(3, seed=seed) for seed in range(6)])
    return Blocks.of(model.generate(ids, max_new_tokens=13, **OPTIONS))


def learn(lesson: HeadLesson, text: Blocks, steps: int) -> None:
    optimizer = torch.optim.Adam(lesson.model.parameters(), 1e-2)
    for step in range(steps):
        loss = lesson.loss(lesson.model, text, step, steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def assert_steps_are(
    lesson: HeadLesson,
    text: Blocks,
    depth: int,
    logits: Callable[[list[int], list[int]], Tensor],
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Hold each unrolled step of a head to the logits, `[ids it can draft]`, after a text and tokens drafted behind."""
    ids = text.ids[0].tolist()
    with torch.no_grad():
        seen, _ = lesson._read(text.chosen(slice(0, 1)))
        found = lesson.model(seen, depth)
    for step, said in enumerate(found):
        # The pair of tokens p and p + 1, of which the last `step` were drafted.
        for pair, given in enumerate(said, step):
            expected = logits(ids[: pair + 2 - step], ids[pair + 2 - step : pair + 2])
            torch.testing.assert_close(given, expected, rtol=rtol, atol=atol)


def assert_learns_and_drafts(
    lesson: HeadLesson,
    text: Blocks,
    draft: str,
    folder: Path,
    proposer: Any,
    figures: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    steps: int = 60,
    draft_length: Any = 3,
) -> Any:
    model, before = lesson._base, lesson.measure()
    base = fingerprint(model)
    learn(lesson, text, steps)
    after = lesson.measure()
    for name in figures:
        assert after[name] > before[name] + 0.1, name
    assert fingerprint(model) == base
    folder.mkdir(exist_ok=True)
    lesson.save(folder, torch.float64, after)
    found = reference_heads.recorded_drafts(monkeypatch, proposer)
    spec = selfspec.wrap(model, f"{draft}:{folder}", draft_length=draft_length)
    out = spec.generate(text.ids[:1, :3], max_new_tokens=13, **OPTIONS)
    assert torch.equal(out.sequences, text.ids[:1])
    assert out.stats.accepted > 0
    return found


def trained(lesson: HeadLesson, text: Blocks, steps: int) -> HeadLesson:
    lesson.model.double()
    learn(lesson, text, steps)
    return lesson


def test_each_medusa_head_says_what_the_saved_one_drafts(model: PreTrainedModel, text: Blocks, tmp_path: Path) -> None:
    lesson = trained(MedusaLesson(model, MEDUSA, Split(text, text), 0), text, 3)
    lesson.save(tmp_path, torch.float64, {})
    weights = load_file(tmp_path / "model.safetensors")
    logits = reference_heads.medusa(model, weights, 1)
    assert_steps_are(lesson, text, MEDUSA.depth, logits)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 1)
    named = [f"{head}.{name}" for head in range(3) for name in ("0.linear.weight", "0.linear.bias", "1.weight")]
    assert sorted(weights) == sorted(named)


def test_medusa_heads_learn_and_draft(
    model: PreTrainedModel, text: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = ("agreement_1", "alpha_1", "alpha_3", "accepted_greedily")
    lesson = trained(MedusaLesson(model, MEDUSA, Split(text, text), 0), text, 0)
    found = assert_learns_and_drafts(lesson, text, "medusa", tmp_path, MedusaProposer, figures, monkeypatch)
    weights = load_file(tmp_path / "model.safetensors")
    reference_heads.assert_drafts_are(found, reference_heads.medusa(model, weights, 1))


def test_each_mask_says_what_the_saved_lora_drafts(model: PreTrainedModel, text: Blocks, tmp_path: Path) -> None:
    lesson = trained(UnoLesson(model, UNO, Split(text, text), 0), text, 3)
    lesson.model.eval()
    lesson.save(tmp_path, torch.float64, {})
    weights = load_file(tmp_path / "adapter_model.safetensors")
    assert any(weight.any() for name, weight in weights.items() if "lora_B" in name)
    assert_steps_are(lesson, text, UNO.depth, reference_heads.uno(model, weights, 1.0))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["uno_depth"]) == (8, 8, 2)
    assert {"q_proj", "down_proj"} <= set(config["target_modules"])


@pytest.mark.tools
def test_a_lora_learns_and_drafts(
    model: PreTrainedModel, text: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = ("agreement_1", "alpha_1", "alpha_2", "accepted_greedily")
    lesson = trained(UnoLesson(model, UNO, Split(text, text), 0), text, 0)
    found = assert_learns_and_drafts(
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
    assert_steps_are(lesson, text, MTP.depth, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.tools
@pytest.mark.parametrize("kind", DENSE)
def test_a_module_learns_and_drafts_from_its_new_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, to = published_heads.mtp(tmp_path / "base", kind), tmp_path / "module"
    text = said_by(made.model)
    lesson, figures = MtpLesson(made.model, MTP, Split(text, text), 0), ("alpha_1", "alpha_3", "accepted_greedily")
    assert assert_learns_and_drafts(lesson, text, "mtp", to, PairProposer, figures, monkeypatch)
    assert load_file(to / "model.safetensors").keys() == {*lesson.model.weights()}


def test_a_module_that_cannot_learn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadError, match="no module"):
        MtpLesson.check(tiny.llama())
    with pytest.raises(TrainingError, match="experts"):
        MtpLesson.check(published_heads.mtp(tmp_path / "experts", "glm4_moe").model)
    with pytest.raises(TrainingError, match="has 2 modules"):
        MtpLesson.check(published_heads.mtp(tmp_path / "several", "qwen3_5_text", modules=2).model)


RECIPE = HeadRecipe(kind="eagle3", depth=3, vocabulary=20)


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
    before = fingerprint(model)
    lesson = lesson_on(model, text, replace(RECIPE, vocabulary=vocabulary))
    assert fingerprint(model) == before
    weights, config = saved(lesson, tmp_path)
    if vocabulary is None:
        weights["d2t"] = torch.zeros(model.config.vocab_size, dtype=torch.long)
    logits = reference_heads.eagle3(model, weights, config, (2, 4, 5))
    kept = torch.arange(len(weights["d2t"])) + weights["d2t"]
    assert_steps_are(
        lesson, text, RECIPE.depth, lambda read, drafted: logits(read, drafted)[kept], rtol=1e-4, atol=1e-5
    )


def test_a_head_learns_and_drafts_with_what_it_learnt(
    model: PreTrainedModel, text: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lesson = lesson_on(model, text)
    figures = ("agreement_1", "agreement_3", "alpha_1", "alpha_3", "accepted_greedily")
    found = assert_learns_and_drafts(lesson, text, "eagle", tmp_path, PairProposer, figures, monkeypatch, 80)
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
