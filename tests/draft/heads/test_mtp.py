"""Modules for multi-token prediction in checkpoints: read from their files, and drafting what they were trained for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import selfspec
from helpers import published_heads, reference_heads, tiny
from helpers.drafting import GREEDY
from helpers.joints import padded
from helpers.reference_heads import PROMPTS
from helpers.tiny import in_turns
from selfspec.draft.heads.mtp import MultiTokenPrediction
from selfspec.draft.heads.pairs import PairProposer
from selfspec.errors import HeadError
from selfspec.tools.prospects import held_modules

# Their layers with states read token by token.
SLOW = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@pytest.mark.parametrize(
    ("kind", "control"), in_turns(list(published_heads.MTP), [3, selfspec.FixedLength(3, nodes=6)], slow=SLOW)
)
def test_a_module_drafts_what_it_was_trained_for(
    kind: str, control: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = published_heads.mtp(tmp_path, kind)
    found = reference_heads.drafts_of(monkeypatch, PairProposer, made.model, "mtp", control, new=8)
    reference_heads.assert_drafts_are(found, reference_heads.mtp(made.model, made.blocks, made.weights, kind))


@pytest.mark.parametrize(
    ("kind", "control"),
    in_turns(
        ["deepseek_v3", "qwen3_next", "ernie4_5_moe", "mellum", "mimo_v2_flash", "step3p7"],
        [5, selfspec.FixedLength(4, nodes=9)],
        slow=SLOW,
    ),
)
def test_several_modules_draft_in_their_order(
    kind: str, control: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Few words, so that random modules often guess right.
    made = published_heads.mtp(tmp_path, kind, modules=3, vocab_size=6)
    found = reference_heads.recorded_drafts(monkeypatch, PairProposer)
    ids, mask = padded([prompt % 3 + 3 for prompt in PROMPTS])
    spec = selfspec.wrap(made.model, "mtp", draft_length=control)
    out = spec.generate(ids, attention_mask=mask, max_new_tokens=12, **GREEDY)
    assert out.stats.accepted > 0 or kind == "mellum"
    # Rows that end, each in its own round.
    spec.generate(ids, attention_mask=mask, max_new_tokens=12, **GREEDY | {"eos_token_id": int(out.sequences[0, -6])})
    reference_heads.assert_drafts_are(found, reference_heads.mtp(made.model, made.blocks, made.weights, kind))


@pytest.mark.parametrize("modules", [1, 3])
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_its_first_tokens_are_those_of_transformers(
    kind: str, modules: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"num_nextn_predict_layers": modules}
    made = published_heads.mtp(tmp_path, kind, modules, **options)
    found = reference_heads.recorded_drafts(monkeypatch, PairProposer)
    spec = selfspec.wrap(made.model, "mtp", draft_length=modules + 1)
    spec.generate(PROMPTS[1], max_new_tokens=8, **GREEDY)
    made.model._keys_to_ignore_on_load_unexpected = {r"model\.layers\.[456].*"}
    theirs = MtpModel.from_pretrained(made.model).eval()
    if hasattr(theirs, "set_experts_implementation"):
        theirs.set_experts_implementation("eager")
    theirs.config._experts_implementation = "eager"
    for each in found:
        text = torch.tensor([each.text])
        with torch.no_grad():
            states = made.model(text[:, :-1], output_hidden_states=True).hidden_states[-1]
            tokens, _, _ = theirs(
                text[:, 1:], states, None, torch.arange(1, text.shape[1])[None], MtpCache(config=theirs.config)
            )
        drafted = each.draft.tokens[0, :modules]
        assert torch.equal(drafted, tokens[0, : len(drafted)])


def test_modules_may_lie_in_a_file_that_the_index_does_not_name(tmp_path: Path) -> None:
    made = published_heads.mtp(tmp_path, "mimo_v2_flash", modules=2)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    ours = {name: weight for name, weight in weights.items() if ".mtp." in name}
    save_file(ours, tmp_path / "model_mtp.safetensors")
    save_file({name: weight for name, weight in weights.items() if name not in ours}, file, {"format": "pt"})
    held = held_modules(str(tmp_path), made.model.config)
    assert held is not None
    assert (held.held, held.parameters) == (2, sum(weight.numel() for weight in ours.values()))
    out = selfspec.wrap(made.model, "mtp", draft_length=2).generate(PROMPTS[1], max_new_tokens=6, **GREEDY)
    assert out.stats.drafted > 0


def test_a_step_checkpoint_may_call_its_layers_and_heads_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = published_heads.mtp(tmp_path, "step3p7", modules=2)
    file = tmp_path / "model.safetensors"
    renamed = {
        name.replace("shared_head.head", "shared_head.output").replace(".5.self_attn", ".5.transformer.self_attn"): each
        for name, each in load_file(file).items()
    }
    save_file(renamed, file, {"format": "pt"})
    found = reference_heads.recorded_drafts(monkeypatch, PairProposer)
    spec = selfspec.wrap(made.model, "mtp", draft_length=2)
    out = spec.generate(PROMPTS[1], max_new_tokens=6, **GREEDY)
    reference_heads.assert_drafts_are(found, reference_heads.mtp(made.model, made.blocks, made.weights, "step3p7"))
    own = MultiTokenPrediction().own_bytes(made.model)
    # All embeddings and the head of the model itself are not counted; slots for a draft are.
    slots = PROMPTS[1].shape[1] + 6 + 2
    assert out.stats.draft_bytes == own.weights + slots * own.token


def in_float8(folder: Path, made: published_heads.MtpCheckpoint, block: tuple[int, int]) -> None:
    """Keep the first module's matrices in float8, and make the reference compute with what comes of them."""
    weights = load_file(folder / "model.safetensors")
    layer = {}
    for name, weight in list(weights.items()):
        inside = name.removeprefix("model.layers.4.")
        if inside == name or weight.ndim < 2 or name.endswith("mlp.gate.weight"):
            continue
        # Blocks that are cut off at the edges are as large as others.
        rows, columns = (-(-size // of) for size, of in zip(weight.shape, block, strict=True))
        scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.01 + 0.001
        spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: len(weight), : weight.shape[1]]
        weights[name] = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scales
        exact = (weights[name].float() * spread).double()
        if inside == "eh_proj.weight":
            made.weights[0]["projection"] = exact
        else:
            layer[f"model.layers.0.{inside}"] = exact
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    made.blocks[0].save_pretrained(folder / "block")
    save_file(
        load_file(folder / "block/model.safetensors") | layer, folder / "block/model.safetensors", {"format": "pt"}
    )
    made.blocks[0] = type(made.blocks[0]).from_pretrained(folder / "block").eval()
    made.blocks[0].set_experts_implementation("eager")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("block", [(16, 16), (128, 128), (8, 24)], ids=str)
def test_a_module_in_float8_drafts_what_its_blocks_say(
    block: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = published_heads.mtp(tmp_path, "deepseek_v3")
    in_float8(tmp_path, made, block)
    found = reference_heads.recorded_drafts(monkeypatch, PairProposer)
    out = selfspec.wrap(made.model, "mtp", draft_length=2).generate(PROMPTS[1], max_new_tokens=6, **GREEDY)
    reference_heads.assert_drafts_are(found, reference_heads.mtp(made.model, made.blocks, made.weights, "deepseek_v3"))
    held = held_modules(str(tmp_path), made.model.config)
    assert held is not None
    assert out.stats.draft_bytes > held.parameters * 8


def test_other_layouts_in_few_bits_are_refused_by_name(tmp_path: Path) -> None:
    made = published_heads.mtp(tmp_path, "deepseek_v3")
    weights = load_file(tmp_path / "model.safetensors")
    in_float8(tmp_path, made, (16, 16))
    rounded = load_file(tmp_path / "model.safetensors")

    def refusal(**changed: torch.Tensor | None) -> str:
        kept = {**rounded, **{f"model.layers.4.{name}".replace("/", "."): each for name, each in changed.items()}}
        save_file({name: each for name, each in kept.items() if each is not None}, tmp_path / "model.safetensors")
        with pytest.raises(HeadError) as refused:
            selfspec.wrap(made.model, "mtp", draft_length=2).generate(PROMPTS[1], max_new_tokens=4, **GREEDY)
        return str(refused.value)

    place = "self_attn/o_proj/weight"
    assert "as fp8 does (block.self_attn.o_proj.weight in torch.float8" in refusal(**{f"{place}_scale_inv": None})
    assert "blocks of [16, 16] need" in refusal(**{f"{place}_scale_inv": torch.ones(1, 1)})
    assert "(block.self_attn.o_proj.weight_packed)" in refusal(
        **{place: None, f"{place}_scale_inv": None, f"{place}_packed": torch.zeros(4, 4, dtype=torch.int32)}
    )
    assert "in torch.int8" in refusal(**{place: torch.zeros(32, 40, dtype=torch.int8)})
    assert "NaN" in refusal(**{f"{place}_scale_inv": torch.full((2, 3), torch.inf)})
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    selfspec.wrap(made.model, "mtp", draft_length=2).generate(PROMPTS[1], max_new_tokens=4, **GREEDY)


def test_what_is_missing_is_said_before_any_pass(tmp_path: Path) -> None:
    made = published_heads.mtp(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    weights = load_file(tmp_path / "model.safetensors")

    def without(part: str) -> None:
        kept = {name: weight for name, weight in weights.items() if part not in name}
        save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})

    without("eh_proj")
    with pytest.raises(HeadError, match="lack its projection"):
        selfspec.wrap(made.model, "mtp")
    without("layers.4.self_attn.o_proj")
    with pytest.raises(HeadError, match="are missing"):
        selfspec.wrap(made.model, "mtp").generate(PROMPTS[0], max_new_tokens=4, **GREEDY)
    without("layers.4")
    with pytest.raises(HeadError, match="though the config promises 1; download the checkpoint whole"):
        selfspec.wrap(made.model, "mtp")
    with pytest.raises(HeadError, match="'llama' have no module"):
        selfspec.wrap(tiny.llama(), "mtp")
    made.model.config._name_or_path = made.model.name_or_path = ""
    with pytest.raises(HeadError, match="write mtp:FOLDER"):
        selfspec.wrap(made.model, "mtp")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    other = published_heads.mtp(tmp_path / "other", "deepseek_v3", hidden_size=48)
    with pytest.raises(HeadError, match="another model's"):
        selfspec.wrap(other.model, f"mtp:{tmp_path}")
