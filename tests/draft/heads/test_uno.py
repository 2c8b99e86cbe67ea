"""UNO: mask rows guess what the LoRA, merged into the model, says of them, and leave the target's rows as they are."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import selfspec
from helpers import published_heads, reference_heads, tiny
from helpers.joints import padded
from helpers.shrunken import shrunken
from selfspec.draft.heads.uno import Uno, UnoProposer, mask_ids
from selfspec.errors import HeadError, UnsupportedModelError
from selfspec.model.layer_path import LayerPath, Lora, LoraRows
from selfspec.model.registry import find_adapter
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner

PROMPTS = [tiny.prompt(length, seed=length).clamp(min=1) for length in (3, 9, 1, 6)]
OPTIONS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
# Passes that take turns, and those that hold one, two and three levels of masks.
CONTROLS = [1, 5, selfspec.FixedLength(3, nodes=8), selfspec.FixedLength(3, nodes=15)]


@pytest.mark.parametrize("control", CONTROLS, ids=str)
@pytest.mark.parametrize("root", [False, True])
def test_masks_guess_what_a_model_with_the_lora_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: bool, control: Any
) -> None:
    model = tiny.llama()
    folder = published_heads.uno(tmp_path, model, use_rslora=root)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    found = reference_heads.recorded_drafts(monkeypatch, UnoProposer)
    ids, mask = padded(PROMPTS)
    spec = selfspec.wrap(model, f"uno:{folder}", draft_length=control)
    out = spec.generate(ids, attention_mask=mask, max_new_tokens=16, **OPTIONS)
    assert out.stats.drafted > 0
    reference_heads.assert_drafts_are(found, reference_heads.uno(model, weights, 24 / (4 if root else 16)))
    levels = 1 if isinstance(control, int) else {8: 2, 15: 3}[control.nodes]
    assert max(each.draft.length for each in found) == levels


def test_a_lora_leaves_the_tokens_before_its_own_bit_for_bit(tmp_path: Path) -> None:
    model = tiny.llama()
    adapter, depth = find_adapter(model), model.config.num_hidden_layers
    lora = Uno(published_heads.uno(tmp_path, model))._lora(model)
    nothing = Lora(lora.down, {name: copy.deepcopy(module) for name, module in lora.up.items()})
    for module in nothing.up.values():
        module.get_parameter("weight").data.zero_()
    found = []
    for each in (lora, nothing):
        cache = adapter.shared_cache(model, 2, 16, 8)
        runner = ModelRunner(model, adapter, cache)
        path = LayerPath(depth, lora=LoraRows(each, 3))
        with torch.no_grad():
            found.append(runner.run(PassRequest(path, tiny.prompt(6, 2))).logits)
    assert torch.equal(found[0][:, :3], found[1][:, :3])
    assert not torch.isclose(found[0][:, 3:], found[1][:, 3:]).all(-1).any()


def test_masks_of_a_place_are_the_same_whatever_is_beside_it() -> None:
    ids = mask_ids(torch.arange(1000), 3, 50)
    assert ids.min() >= 3
    assert ids.max() < 50
    assert ids.unique().numel() > 40
    assert torch.equal(mask_ids(torch.arange(500, 510), 3, 50), ids[500:510])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "no LoRA of linear layers alone: see use_dora"),
        ({"peft_type": "IA3"}, "see its adapter_config.json"),
        ({"uno_mask_token_id": 10**6}, "this model knows"),
        ({"uno_depth": 0}, "1 or more"),
    ],
)
def test_a_config_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    model = tiny.llama()
    folder = published_heads.uno(tmp_path, model, **change)
    with pytest.raises(HeadError, match=said):
        selfspec.wrap(model, f"uno:{folder}")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = tiny.llama()
    folder = Path(published_heads.uno(tmp_path, model))
    with pytest.raises(HeadError, match="trained for another model"):
        selfspec.wrap(tiny.llama(hidden_size=48), f"uno:{folder}")
    weights = load_file(folder / "adapter_model.safetensors")
    lacking = next(name for name in weights if name.endswith("lora_B.weight"))
    save_file({name: each for name, each in weights.items() if name != lacking}, folder / "adapter_model.safetensors")
    with pytest.raises(HeadError, match="no LoRA of linear layers alone"):
        selfspec.wrap(model, f"uno:{folder}")
    (folder / "adapter_config.json").write_text(json.dumps({"medusa_num_heads": 3}))
    with pytest.raises(HeadError, match="write medusa:"):
        selfspec.wrap(model, f"uno:{folder}")


@pytest.mark.parametrize(("kind", "said"), [("opt", "of 2 dimensions"), ("falcon_h1", "token by token")])
def test_a_model_that_hides_the_places_of_tokens_is_refused(tmp_path: Path, kind: str, said: str) -> None:
    model = shrunken(kind)
    folder = published_heads.uno(tmp_path, model)
    with pytest.raises(UnsupportedModelError, match=said):
        selfspec.wrap(model, f"uno:{folder}", draft_length=3).generate(PROMPTS[1], max_new_tokens=4, **OPTIONS)
