"""DFlash heads: what a block guesses is what its equations say, and what is generated is the target's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import selfspec
from helpers import published_heads, reference_heads, tiny
from helpers.joints import padded
from selfspec.draft.heads.growing_head import LevelProposer
from selfspec.errors import HeadError

PROMPTS = [tiny.prompt(length, seed=length).clamp(min=1) for length in (3, 9, 1, 6)]
OPTIONS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
CONTROLS = [2, 6, selfspec.FixedLength(3, nodes=7)]
VARIANTS: dict[str, dict[str, Any]] = {
    "authors": {},
    "llama": {"kind": "llama", "layers": 1},
    "speculators": {"layout": "speculators"},
    # What they read of the last layer is the state that transformers gives, which is after the final norm.
    "last-layer": {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 3]}},
    # The other library takes the state as it leaves the layer.
    "last-layer-of-speculators": {"layout": "speculators", "aux_hidden_state_layer_ids": [1, 4]},
    "from-anchor": {"layout": "speculators", "sample_from_anchor": True},
}


@pytest.mark.parametrize("control", CONTROLS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_drafts_what_it_was_published_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, control: Any
) -> None:
    model, options = tiny.llama(), VARIANTS[variant]
    folder = published_heads.dflash(tmp_path, model, **options)
    found = reference_heads.recorded_drafts(monkeypatch, LevelProposer)
    ids, mask = padded(PROMPTS)
    spec = selfspec.wrap(model, f"dflash:{folder}", draft_length=control)
    spec.generate(ids, attention_mask=mask, max_new_tokens=12, **OPTIONS)
    weights, first = load_file(tmp_path / "model.safetensors"), int(variant != "from-anchor")
    last = {"last-layer": "normed", "last-layer-of-speculators": "last"}.get(variant, 3)
    expected = reference_heads.dflash(model, weights, options.get("layers", 2), first, last)
    reference_heads.assert_drafts_are(found, expected)
    assert max(each.draft.length for each in found) == {2: 2, 6: 4 - first}.get(control, 3)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = tiny.llama()
    folder = published_heads.dflash(tmp_path / "a", model)
    with pytest.raises(HeadError, match="trained for another model"):
        selfspec.wrap(tiny.llama(hidden_size=48), f"dflash:{folder}")
    with pytest.raises(HeadError, match="knows token 3, and this model has 3"):
        selfspec.wrap(tiny.llama(vocab_size=3), f"dflash:{folder}")
    far = published_heads.dflash(tmp_path / "b", model, dflash_config={"mask_token_id": 3, "target_layer_ids": [1, 9]})
    with pytest.raises(HeadError, match="reads layer 10"):
        selfspec.wrap(model, f"dflash:{far}")
    without = published_heads.dflash(tmp_path / "c", model, block_size=None)
    with pytest.raises(HeadError, match="lacks target_layer_ids, mask_token_id or block_size"):
        selfspec.wrap(model, f"dflash:{without}")
    weights = load_file(tmp_path / "a" / "model.safetensors")
    save_file({name: each for name, each in weights.items() if name != "layers.1.mlp.up_proj.weight"},
              tmp_path / "a" / "model.safetensors")  # fmt: skip
    with pytest.raises(HeadError, match=r"lacks the weight layers\.1\.mlp\.up_proj\.weight"):
        selfspec.wrap(model, f"dflash:{folder}").generate(PROMPTS[1], max_new_tokens=4, **OPTIONS)
