"""Heads that do not fit a model, lack a part or are damaged: each is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import selfspec
from helpers import published_heads, tiny
from helpers.drafting import GREEDY
from helpers.joints import assert_rows_are_stock
from helpers.reference_heads import PROMPTS
from helpers.shrunken import shrunken
from selfspec.errors import HeadError, UnsupportedModelError

SPECULATORS = {"layout": "speculators"}
FAR = {"mask_token_id": 3, "target_layer_ids": [1, 9]}
ANOTHER = "trained for another model"
# A kind of head, options of its writer, of the model that it is given to, and the words of the refusal.
MISFITS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("eagle3", SPECULATORS, {"hidden_size": 48}, "trained for another model: .*; it is for some/base"),
    ("eagle3", SPECULATORS, {"num_hidden_layers": 4}, "too few"),
    ("eagle3", SPECULATORS, {"vocab_size": 21}, "of 50 tokens, and this model knows 21"),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": [2, 4, 30]}, {}, "reads layer 30"),
    ("eagle3", {"target_hidden_size": 48}, {}, "one of width 48, and this one has 32"),
    ("eagle3", {"backbone_hidden_size": 32}, {}, "write queries:"),
    ("dflash", {}, {"hidden_size": 48}, ANOTHER),
    ("dflash", {}, {"vocab_size": 3}, "masks with token 3, and this model knows 3"),
    ("dflash", {"dflash_config": FAR}, {}, "reads layer 10"),
    ("dflash", {"block_size": None}, {}, "lacks target_layer_ids, mask_token_id or block_size"),
    ("peagle", {"mask_token_id": 60}, {}, "masks with token 60, and this model knows 50"),
    ("peagle", {"mask_token_id": None}, {}, "names no mask_token_id"),
    ("medusa", {}, {"vocab_size": 51}, ANOTHER),
    ("medusa", {}, {"hidden_size": 48}, ANOTHER),
    ("hydra", {}, {"vocab_size": 51}, ANOTHER),
    ("hydra", {}, {"hidden_size": 48}, ANOTHER),
    ("uno", {}, {"hidden_size": 48}, ANOTHER),
    ("uno", {"use_dora": True}, {}, "no LoRA of linear layers alone: see use_dora"),
    ("uno", {"peft_type": "IA3"}, {}, "see its adapter_config.json"),
    ("uno", {"uno_mask_token_id": 10**6}, {}, "this model knows"),
    ("uno", {"uno_depth": 0}, {}, "1 or more"),
]


@pytest.mark.parametrize(("kind", "of_head", "of_model", "words"), MISFITS)
def test_what_does_not_fit(
    tmp_path: Path, kind: str, of_head: dict[str, Any], of_model: dict[str, Any], words: str
) -> None:
    layers: dict[str, Any] = {"num_hidden_layers": 8}
    write: Any = published_heads.WRITERS[kind]
    folder = write(tmp_path, tiny.llama(**layers), **of_head)
    with pytest.raises(HeadError, match=words):
        selfspec.wrap(tiny.llama(**{**layers, **of_model}), f"{kind.rstrip('13')}:{folder}")


def generated(model: PreTrainedModel, draft: str) -> None:
    selfspec.wrap(model, draft, draft_length=3).generate(PROMPTS[1], max_new_tokens=4, **GREEDY)


@pytest.mark.parametrize(
    ("kind", "lost", "words"),
    [
        ("eagle3", ("d2t", "t2d"), "lacks d2t, which says which"),
        ("dflash", ("layers.1.mlp.up_proj",), r"lacks the weight layers\.1\.mlp\.up_proj\.weight"),
        ("peagle", ("mask_hidden",), "no weight mask_hidden"),
        ("medusa", ("1.1.weight",), r"lacks the weight 1\.1\.weight"),
        ("hydra", ("lm_head.1",), r"lacks the weight hydra_lm_head\.1\.1\.weight"),
        ("hydra", ("prefix",), "no Hydra heads with a prefix layer"),
        ("uno", ("layers.1.mlp.up_proj.lora_B",), "no LoRA of linear layers alone"),
    ],
)
def test_a_head_that_lacks_a_weight(tmp_path: Path, kind: str, lost: tuple[str, ...], words: str) -> None:
    model = tiny.llama(num_hidden_layers=8)
    published_heads.WRITERS[kind](tmp_path, model)
    (file,) = (each for each in tmp_path.iterdir() if each.suffix in (".pt", ".safetensors"))
    weights = torch.load(file) if file.suffix == ".pt" else load_file(file)
    left = {name: weight for name, weight in weights.items() if not any(part in name for part in lost)}
    torch.save(left, file) if file.suffix == ".pt" else save_file(left, file)
    # Layers of DFlash alone are looked for when it drafts.
    refusing = generated if kind == "dflash" else selfspec.wrap
    with pytest.raises(HeadError, match=words):
        refusing(model, f"{kind.rstrip('13')}:{tmp_path}")


@pytest.mark.parametrize(("kind", "words"), [("opt", "of 2 dimensions"), ("falcon_h1", "token by token")])
def test_a_model_that_hides_the_places_of_tokens_from_uno(tmp_path: Path, kind: str, words: str) -> None:
    model = shrunken(kind)
    folder = published_heads.uno(tmp_path, model)
    with pytest.raises(UnsupportedModelError, match=words):
        generated(model, f"uno:{folder}")


def test_assistants_of_gemma(tmp_path: Path) -> None:
    model = shrunken("gemma4_text")
    folder = published_heads.queries(tmp_path, model)
    with pytest.raises(HeadError, match=ANOTHER):
        selfspec.wrap(tiny.llama(), f"queries:{folder}")
    with pytest.raises(HeadError, match="write queries:"):
        selfspec.wrap(model, f"eagle:{folder}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(HeadError, match="truncated or corrupt"):
        selfspec.wrap(model, f"queries:{folder}")


def test_a_vocabulary_that_is_mapped_wrongly(tmp_path: Path) -> None:
    model = tiny.llama(num_hidden_layers=8)
    folder = published_heads.eagle3(tmp_path, model)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    tokens = weights["t2d"].nonzero()[:, 0]
    others = weights["t2d"].roll(1)
    # Ids in the place of differences, a token of no model, and those of another head.
    changes = [{"d2t": tokens}, {"d2t": weights["d2t"].roll(1)}, {"d2t": weights["d2t"] + 1000}, {"t2d": others}]
    for change in changes:
        save_file({**weights, **change}, file)
        with pytest.raises(HeadError, match=r"to none of this model|name different tokens"):
            selfspec.wrap(model, f"eagle:{folder}").generate(PROMPTS[0], max_new_tokens=8)


def test_damaged_folders(tmp_path: Path) -> None:
    model = tiny.llama(num_hidden_layers=8)
    published_heads.eagle3(tmp_path, model)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    listing = tmp_path / "model.safetensors.index.json"
    index = {"weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}
    for damage, words in (
        (lambda: weights.write_bytes(weights.read_bytes()[:-40]), "truncated or corrupt"),
        (weights.unlink, "no weights"),
        (lambda: listing.write_text(json.dumps(index)), "lacks 1 of 1 weight files"),
        (lambda: config.write_text("["), "cannot be read"),
    ):
        damage()
        with pytest.raises(HeadError, match=words):
            selfspec.wrap(model, f"eagle:{tmp_path}")
    with pytest.raises(HeadError, match="there is no folder"):
        selfspec.wrap(model, f"eagle:{tmp_path / 'nowhere'}")


class Runs:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit",)


def test_a_pickle_of_tensors_is_read_and_one_with_code_is_refused(tmp_path: Path) -> None:
    model = tiny.llama(num_hidden_layers=8)
    folder = published_heads.eagle1(tmp_path, model)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    spec = selfspec.wrap(model, f"eagle:{folder}", draft_length=3)
    assert_rows_are_stock(model, spec, PROMPTS, max_new_tokens=12, eos_token_id=7)
    torch.save({**weights, "fc.weight": Runs()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(HeadError, match="would run code"):
        selfspec.wrap(model, f"eagle:{folder}")
