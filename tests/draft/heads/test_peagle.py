"""P-EAGLE heads: what one pass guesses is what their equations say, and what is generated is the target's own."""

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
CONTROLS = [1, 4, selfspec.FixedLength(3, nodes=7)]


@pytest.mark.parametrize("control", CONTROLS, ids=str)
def test_a_head_drafts_what_it_was_published_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: Any) -> None:
    model = tiny.llama(num_hidden_layers=8)
    folder = published_heads.peagle(tmp_path, model)
    found = reference_heads.recorded_drafts(monkeypatch, LevelProposer)
    ids, mask = padded(PROMPTS)
    spec = selfspec.wrap(model, f"peagle:{folder}", draft_length=control)
    spec.generate(ids, attention_mask=mask, max_new_tokens=12, **OPTIONS)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = load_file(tmp_path / "model.safetensors")
    reference_heads.assert_drafts_are(found, reference_heads.peagle(model, weights, config))


def test_a_draft_takes_one_pass_of_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = tiny.llama(num_hidden_layers=8)
    folder = published_heads.peagle(tmp_path / "a", model)
    with pytest.raises(HeadError, match="masks with token 60, and this model knows 50"):
        selfspec.wrap(model, f"peagle:{published_heads.peagle(tmp_path / 'b', model, mask_token_id=60)}")
    with pytest.raises(HeadError, match="names no mask_token_id"):
        selfspec.wrap(model, f"peagle:{published_heads.peagle(tmp_path / 'c', model, mask_token_id=None)}")
    weights = load_file(tmp_path / "a" / "model.safetensors")
    del weights["mask_hidden"]
    save_file(weights, tmp_path / "a" / "model.safetensors")
    with pytest.raises(HeadError, match="no weight mask_hidden"):
        selfspec.wrap(model, f"peagle:{folder}")
