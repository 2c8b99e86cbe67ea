"""DFlash and P-EAGLE heads: what one pass guesses is what their equations say, and the text is the target's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import selfspec
from helpers import published_heads, reference_heads, tiny
from helpers.joints import padded
from selfspec.draft.heads.growing_head import LevelProposer
from selfspec.draft.heads.pairs import PairState
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


@pytest.mark.parametrize("control", [1, 4, selfspec.FixedLength(3, nodes=7)], ids=str)
def test_a_peagle_head_drafts_what_it_was_published_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: Any
) -> None:
    model = tiny.llama(num_hidden_layers=8)
    folder = published_heads.peagle(tmp_path, model)
    found = reference_heads.recorded_drafts(monkeypatch, LevelProposer)
    ids, mask = padded(PROMPTS)
    spec = selfspec.wrap(model, f"peagle:{folder}", draft_length=control)
    spec.generate(ids, attention_mask=mask, max_new_tokens=12, **OPTIONS)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = load_file(tmp_path / "model.safetensors")
    reference_heads.assert_drafts_are(found, reference_heads.peagle(model, weights, config))


def test_a_draft_of_peagle_takes_one_pass_of_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama(num_hidden_layers=8)
    passes: list[int] = []
    run = PairState._run

    def counted(self: Any, inputs: Any, first: int) -> Any:
        passes.append(inputs.shape[1])
        return run(self, inputs, first)

    monkeypatch.setattr(PairState, "_run", counted)
    spec = selfspec.wrap(model, f"peagle:{published_heads.peagle(tmp_path, model)}", draft_length=4)
    stats = spec.generate(PROMPTS[1], max_new_tokens=12, **OPTIONS).stats
    assert stats.drafted > 3 * len(passes) > 0


FAR = {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 9]}}


@pytest.mark.parametrize(
    ("kind", "of_head", "of_model", "words"),
    [
        ("dflash", {}, {"hidden_size": 48}, "trained for another model"),
        ("dflash", {}, {"vocab_size": 3}, "knows token 3, and this model has 3"),
        ("dflash", FAR, {}, "reads layer 10"),
        ("dflash", {"block_size": None}, {}, "lacks target_layer_ids, mask_token_id or block_size"),
        ("peagle", {"mask_token_id": 60}, {}, "masks with token 60, and this model knows 50"),
        ("peagle", {"mask_token_id": None}, {}, "names no mask_token_id"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, kind: str, of_head: dict[str, Any], of_model: dict[str, Any], words: str
) -> None:
    layers = {"num_hidden_layers": 8} if kind == "peagle" else {}
    write: Any = published_heads.WRITERS[kind]
    folder = write(tmp_path, tiny.llama(**layers), **of_head)
    with pytest.raises(HeadError, match=words):
        selfspec.wrap(tiny.llama(**layers, **of_model), f"{kind}:{folder}")


@pytest.mark.parametrize(
    ("kind", "lost", "words"),
    [
        ("dflash", "layers.1.mlp.up_proj.weight", r"lacks the weight layers\.1\.mlp\.up_proj\.weight"),
        ("peagle", "mask_hidden", "no weight mask_hidden"),
    ],
)
def test_a_head_that_lacks_a_weight_is_refused(tmp_path: Path, kind: str, lost: str, words: str) -> None:
    model = tiny.llama(num_hidden_layers=8)
    folder = published_heads.WRITERS[kind](tmp_path, model)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[lost]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(HeadError, match=words):
        selfspec.wrap(model, f"{kind}:{folder}").generate(PROMPTS[1], max_new_tokens=4, **OPTIONS)
