"""Published heads of every family, MTP modules of checkpoints among them: they draft what their equations say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel

import selfspec
from helpers import published_heads, reference_heads, tiny
from helpers.drafting import GREEDY
from helpers.encoder_decoders import FRAMES, MELS, START, encoder_decoder, joint
from helpers.joints import p_value, padded
from helpers.reference_heads import PROMPTS, assert_drafts_are, drafts_of
from helpers.shrunken import shrunken
from helpers.snippets import snippets
from helpers.tiny import in_turns
from selfspec.draft import Budget
from selfspec.draft.heads.dflash import BlockProposer
from selfspec.draft.heads.hydra import HydraProposer
from selfspec.draft.heads.medusa import MedusaProposer
from selfspec.draft.heads.mtp import MultiTokenPrediction
from selfspec.draft.heads.pairs import PairProposer
from selfspec.draft.heads.queries import QueriesProposer
from selfspec.errors import HeadError

TREE = selfspec.FixedLength(3, nodes=7)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.llama(num_hidden_layers=8)


def read(folder: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return load_file(Path(folder) / "model.safetensors"), config


EAGLE_3: dict[str, dict[str, Any]] = {
    "safeailab": {},
    "speculators": {"layout": "speculators"},
    "normed-residual": {"layout": "speculators", "norm_before_residual": True},
    "each-normed": {"layout": "speculators", "norm": "each", "norm_output": True},
    "all-normed": {"norm": "all"},
    "other-layers": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]},
}


@pytest.mark.parametrize("control", [3, TREE], ids=str)
@pytest.mark.parametrize("variant", EAGLE_3)
def test_an_eagle_3_head_drafts_what_it_was_published_for(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, control: Any
) -> None:
    folder = published_heads.eagle3(tmp_path, model, **EAGLE_3[variant])
    found = drafts_of(monkeypatch, PairProposer, model, f"eagle:{folder}", control)
    points = EAGLE_3[variant].get("eagle_aux_hidden_state_layer_ids", (2, 4, 5))
    assert_drafts_are(found, reference_heads.eagle3(model, *read(folder), points))


@pytest.mark.parametrize("control", [3, TREE], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_an_eagle_1_head_drafts_what_it_was_published_for(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bias: bool, control: Any
) -> None:
    folder = published_heads.eagle1(tmp_path, model, bias)
    found = drafts_of(monkeypatch, PairProposer, model, f"eagle:{folder}", control)
    assert_drafts_are(found, reference_heads.eagle1(model, read(folder)[0]))


class Later(selfspec.FixedLength):
    """Drafts in the first round, and then not until some more have passed."""

    def begin(self, costs: Any) -> Any:
        made: Any = super().begin(costs)
        budget, rounds = made.budget, iter(range(99))
        made.budget = lambda *given: budget(*given) if next(rounds) not in (1, 2, 3) else Budget(0, 0)
        return made


def test_a_row_without_a_state_waits(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = published_heads.eagle3(tmp_path, model)
    found = drafts_of(monkeypatch, PairProposer, model, f"eagle:{folder}", Later(3))
    assert_drafts_are(found, reference_heads.eagle3(model, *read(folder)))


@pytest.mark.contract
def test_behind_a_look_up_it_still_knows_all_that_was_committed(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = published_heads.eagle3(tmp_path, model)
    repeated = [prompt.repeat(1, 3) for prompt in PROMPTS]
    found = drafts_of(monkeypatch, PairProposer, model, f"lookup+eagle:{folder}", 3, repeated, 30)
    assert_drafts_are(found, reference_heads.eagle3(model, *read(folder)))


DFLASH: dict[str, dict[str, Any]] = {
    "authors": {},
    "llama": {"kind": "llama", "layers": 1},
    "speculators": {"layout": "speculators"},
    # What they read of the last layer is the state that transformers gives, which is after the final norm.
    "last-layer": {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 3]}},
    # The other library takes the state as it leaves the layer.
    "last-layer-of-speculators": {"layout": "speculators", "aux_hidden_state_layer_ids": [1, 4]},
    "from-anchor": {"layout": "speculators", "sample_from_anchor": True},
}


@pytest.mark.parametrize("control", [2, 6, TREE], ids=str)
@pytest.mark.parametrize("variant", DFLASH)
def test_a_dflash_head_drafts_what_it_was_published_for(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, control: Any
) -> None:
    options = DFLASH[variant]
    folder = published_heads.dflash(tmp_path, llama, **options)
    found = drafts_of(monkeypatch, BlockProposer, llama, f"dflash:{folder}", control)
    first = int(variant != "from-anchor")
    last = {"last-layer": "normed", "last-layer-of-speculators": "last"}.get(variant, 3)
    expected = reference_heads.dflash(llama, read(folder)[0], options.get("layers", 2), first, last)
    assert_drafts_are(found, expected)
    assert max(each.draft.length for each in found) == {2: 2, 6: 4 - first}.get(control, 3)


@pytest.mark.parametrize("control", [5, TREE], ids=str)
@pytest.mark.parametrize(("blocks", "pickled"), [(1, True), (2, False)])
def test_medusa_heads_draft_what_they_were_published_for(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, pickled: bool, control: Any
) -> None:
    folder = published_heads.medusa(tmp_path, llama, blocks=blocks, pickled=pickled)
    weights = torch.load(tmp_path / "medusa_lm_head.pt") if pickled else read(folder)[0]
    found = drafts_of(monkeypatch, MedusaProposer, llama, f"medusa:{folder}", control)
    assert_drafts_are(found, reference_heads.medusa(llama, weights, blocks))
    assert max(each.draft.length for each in found) == 3


@pytest.mark.parametrize("control", [5, TREE], ids=str)
@pytest.mark.parametrize(("blocks", "grounded"), [(1, True), (3, True), (2, False)])
def test_hydra_heads_draft_what_they_were_published_for(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, grounded: bool, control: Any
) -> None:
    folder = published_heads.hydra(tmp_path, llama, blocks=blocks, grounded=grounded)
    found = drafts_of(monkeypatch, HydraProposer, llama, f"hydra:{folder}", control)
    assert_drafts_are(found, reference_heads.hydra(llama, torch.load(tmp_path / "hydra_lm_head.pt")))
    assert max(each.draft.length for each in found) == 3


def test_heads_draft_for_a_decoder_beside_an_encoder(tmp_path: Path) -> None:
    model = encoder_decoder("bart")
    spec = selfspec.wrap(model, f"medusa:{published_heads.medusa(tmp_path, model)}", draft_length=3)
    inputs: dict[str, Any] = {"input_ids": torch.tensor([[3, 4, 5, 6], [7, 8, 9, 9]]), "max_new_tokens": 9}
    found = spec.generate(**inputs, do_sample=False)
    assert torch.equal(found.sequences, model.generate(**inputs, do_sample=False))
    assert found.stats.drafted


@pytest.mark.statistical
def test_heads_that_the_page_on_speech_trains_draft_for_whisper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text is the model's greedily, and sampled it has the model's joint."""
    monkeypatch.chdir(tmp_path)
    model = encoder_decoder("whisper", torch.float32, vocab_size=5)
    model.generation_config.max_length = 16
    sounds = torch.randn(6, MELS, FRAMES, generator=torch.Generator().manual_seed(5))
    names: dict[str, Any] = {"selfspec": selfspec, "torch": torch, "model": model, "start": torch.tensor([[START]])}
    names["pieces"] = [{"input_features": sound} for sound in sounds.split(1)]
    exec(snippets("docs/speech.md", "python")[-1], names)
    spec: selfspec.SelfSpeculative = names["spec"]
    for inputs in sounds.split((1, 2, 3)):
        options: dict[str, Any] = {"decoder_input_ids": torch.tensor([[START]] * len(inputs)), "do_sample": False}
        found = spec.generate(inputs, **options)
        assert torch.equal(found.sequences, GenerationMixin.generate(model, inputs, **options))
        assert found.stats.accepted
    sampled: dict[str, Any] = {"max_new_tokens": 3, "do_sample": True, "top_k": 0}
    texts: list[tuple[int, ...]] = []
    rejected = 0
    for seed in range(2):
        start = torch.tensor([[START]] * 512)
        out = spec.generate(sounds[:1].expand(512, -1, -1), decoder_input_ids=start, seed=seed, **sampled)
        texts += [tuple(row) for row in out.sequences[:, 1:].tolist()]
        rejected += out.stats.judged - out.stats.accepted
    assert rejected
    assert p_value(texts, joint({"input_features": sounds[:1]}, model, 3)) > 1e-3


def queries(model: PreTrainedModel, folder: str) -> Callable[[list[int], list[int]], Tensor]:
    """An assistant of Gemma 4 by its own forward: what it gives after a text and draft tokens, `[vocab]`."""
    assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    @torch.no_grad()
    def logits(text: list[int], drafted: list[int]) -> Tensor:
        known = model.model(torch.tensor([text[:-1]]), return_shared_kv_states=True)
        state = known.last_hidden_state[:, -1:]
        for token in (text[-1], *drafted):
            embedded = model.get_input_embeddings()(torch.tensor([[token]]))
            out = assistant(
                inputs_embeds=torch.cat([embedded, state], -1),
                position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=dict(known.shared_kv_states),
            )
            state = out.last_hidden_state
        found: Tensor = out.logits[0, -1]
        return found

    return logits


@pytest.mark.contract
@pytest.mark.parametrize(("groups", "control"), [(False, 4), (True, TREE)], ids=["chain", "groups"])
def test_an_assistant_drafts_what_transformers_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: bool, control: Any
) -> None:
    model = shrunken("gemma4_text")
    folder = published_heads.queries(tmp_path, model, groups)
    # Texts are longer than the window.
    prompts = [tiny.prompt(length, seed=length).clamp(min=3) for length in (3, 14, 1, 6)]
    found = drafts_of(monkeypatch, QueriesProposer, model, f"queries:{folder}", control, prompts, 9)
    assert_drafts_are(found, queries(model, folder))


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
    reference_heads.assert_drafts_are(found, reference_heads.mtp(made, kind))


@pytest.mark.parametrize(
    ("kind", "control"),
    in_turns(
        ["deepseek_v3", "qwen3_next", "ernie4_5_moe", "mellum", "mimo_v2_flash", "step3p7"],
        [5, selfspec.FixedLength(4, nodes=9)],
        slow=SLOW,
    ),
)
def test_the_first_of_several_modules_drafts_all_tokens(
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
    reference_heads.assert_drafts_are(found, reference_heads.mtp(made, kind))


def test_modules_may_lie_in_a_file_that_the_index_does_not_name(tmp_path: Path) -> None:
    made = published_heads.mtp(tmp_path, "mimo_v2_flash")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    ours = {name: weight for name, weight in weights.items() if ".mtp." in name}
    save_file(ours, tmp_path / "model_mtp.safetensors")
    save_file({name: weight for name, weight in weights.items() if name not in ours}, file, {"format": "pt"})
    out = selfspec.wrap(made.model, "mtp", draft_length=2).generate(PROMPTS[1], max_new_tokens=6, **GREEDY)
    assert out.stats.drafted > 0
    # It is there, in float64.
    assert out.stats.draft_bytes > 8 * sum(weight.numel() for weight in ours.values())


def test_a_step_checkpoint_may_call_its_layers_and_heads_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = published_heads.mtp(tmp_path, "step3p7")
    file = tmp_path / "model.safetensors"
    renamed = {
        name.replace("shared_head.head", "shared_head.output").replace(".4.self_attn", ".4.transformer.self_attn"): each
        for name, each in load_file(file).items()
    }
    save_file(renamed, file, {"format": "pt"})
    found = reference_heads.recorded_drafts(monkeypatch, PairProposer)
    spec = selfspec.wrap(made.model, "mtp", draft_length=2)
    out = spec.generate(PROMPTS[1], max_new_tokens=6, **GREEDY)
    reference_heads.assert_drafts_are(found, reference_heads.mtp(made, "step3p7"))
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
    weights = load_file(tmp_path / "model.safetensors")
    module = [weight.numel() for name, weight in weights.items() if ".layers.4." in name]
    in_float8(tmp_path, made, block)
    found = reference_heads.recorded_drafts(monkeypatch, PairProposer)
    out = selfspec.wrap(made.model, "mtp", draft_length=2).generate(PROMPTS[1], max_new_tokens=6, **GREEDY)
    reference_heads.assert_drafts_are(found, reference_heads.mtp(made, "deepseek_v3"))
    assert out.stats.draft_bytes > 8 * sum(module)


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
