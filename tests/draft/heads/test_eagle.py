"""EAGLE heads: what they draft is what their equations say, and what is generated is the target's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import selfspec
from helpers import published_heads, reference_heads, tiny
from helpers.joints import assert_rows_are_stock, padded
from selfspec.draft import Budget
from selfspec.draft.heads.growing_head import HeadProposer
from selfspec.errors import HeadError

PROMPTS = [tiny.prompt(length, seed=length).clamp(min=1) for length in (3, 9, 1, 6)]
OPTIONS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "safeailab": {},
    "speculators": {"layout": "speculators"},
    "normed-residual": {"layout": "speculators", "norm_before_residual": True},
    "each-normed": {"layout": "speculators", "norm": "each", "norm_output": True},
    "all-normed": {"norm": "all"},
    "other-layers": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]},
}
CONTROLS = [3, selfspec.FixedLength(3, nodes=7)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.llama(num_hidden_layers=8)


@pytest.mark.parametrize("control", CONTROLS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_eagle_3_head_drafts_what_it_was_published_for(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, control: Any
) -> None:
    options = VARIANTS[variant]
    folder = published_heads.eagle3(tmp_path, model, **options)
    found = reference_heads.recorded_drafts(monkeypatch, HeadProposer)
    ids, mask = padded(PROMPTS)
    spec = selfspec.wrap(model, f"eagle:{folder}", draft_length=control)
    spec.generate(ids, attention_mask=mask, max_new_tokens=9, **OPTIONS)
    weights = load_file(Path(folder) / "model.safetensors")
    points = options.get("eagle_aux_hidden_state_layer_ids", (2, 4, 5))
    reference_heads.assert_drafts_are(found, reference_heads.eagle3(model, weights, options_of(folder), points))


def options_of(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return found


@pytest.mark.parametrize("control", CONTROLS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_an_eagle_1_head_drafts_what_it_was_published_for(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bias: bool, control: Any
) -> None:
    folder = published_heads.eagle1(tmp_path, model, bias)
    found = reference_heads.recorded_drafts(monkeypatch, HeadProposer)
    ids, mask = padded(PROMPTS)
    spec = selfspec.wrap(model, f"eagle:{folder}", draft_length=control)
    spec.generate(ids, attention_mask=mask, max_new_tokens=9, **OPTIONS)
    weights = load_file(Path(folder) / "model.safetensors")
    reference_heads.assert_drafts_are(found, reference_heads.eagle1(model, weights))


class Later(selfspec.FixedLength):
    """Drafts in the first round, and then not until some more have passed."""

    def begin(self, costs: Any) -> Any:
        made: Any = super().begin(costs)
        budget, rounds = made.budget, iter(range(99))
        made.budget = lambda *given: budget(*given) if next(rounds) not in (1, 2, 3) else Budget(0, 0)
        return made


def test_a_row_without_a_state_waits(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = published_heads.eagle3(tmp_path, model)
    found = reference_heads.recorded_drafts(monkeypatch, HeadProposer)
    spec = selfspec.wrap(model, f"eagle:{folder}", draft_length=Later(3))
    assert_rows_are_stock(model, spec, PROMPTS, max_new_tokens=12, eos_token_id=7)
    weights = load_file(Path(folder) / "model.safetensors")
    reference_heads.assert_drafts_are(found, reference_heads.eagle3(model, weights, {}))


@pytest.mark.contract
def test_behind_a_look_up_it_still_knows_all_that_was_committed(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = published_heads.eagle3(tmp_path, model)
    found = reference_heads.recorded_drafts(monkeypatch, HeadProposer)
    spec = selfspec.wrap(model, f"lookup+eagle:{folder}", draft_length=3)
    repeated = [prompt.repeat(1, 3) for prompt in PROMPTS]
    assert_rows_are_stock(model, spec, repeated, max_new_tokens=30, eos_token_id=7)
    weights = load_file(Path(folder) / "model.safetensors")
    reference_heads.assert_drafts_are(found, reference_heads.eagle3(model, weights, {}))


def test_the_head_and_its_cache_are_all_the_memory_it_takes(model: PreTrainedModel, tmp_path: Path) -> None:
    folder = published_heads.eagle1(tmp_path, model)
    output = selfspec.wrap(model, f"eagle:{folder}", draft_length=3).generate(PROMPTS[1], max_new_tokens=24, **OPTIONS)
    weights = load_file(Path(folder) / "model.safetensors")
    head = sum(weight.nbytes for name, weight in weights.items() if name != "embed_tokens.weight")
    # Keys and values of one layer: 64 slots at first would not do for a longer text.
    cache = (9 + 24 + 3) * 2 * 16 * 8
    assert output.stats.draft_bytes == head + cache


def test_what_does_not_fit_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    other = tiny.llama(num_hidden_layers=8, hidden_size=48)
    folder = published_heads.eagle3(tmp_path / "a", model, "speculators")
    with pytest.raises(HeadError, match="trained for another model, some/base"):
        selfspec.wrap(other, f"eagle:{folder}")
    with pytest.raises(HeadError, match="too few"):
        selfspec.wrap(tiny.llama(), f"eagle:{folder}")
    far = published_heads.eagle3(tmp_path / "b", model, eagle_aux_hidden_state_layer_ids=[2, 4, 30])
    with pytest.raises(HeadError, match="reads layer 30"):
        selfspec.wrap(model, f"eagle:{far}")
    wide = published_heads.eagle3(tmp_path / "c", model, target_hidden_size=48)
    with pytest.raises(HeadError, match="one of width 48, and this one has 32"):
        selfspec.wrap(model, f"eagle:{wide}")
    smaller = tiny.llama(num_hidden_layers=8, vocab_size=21)
    with pytest.raises(HeadError, match="of 50 tokens, and this model knows 21"):
        selfspec.wrap(smaller, f"eagle:{folder}")
    assistant = published_heads.eagle3(tmp_path / "d", model, backbone_hidden_size=32)
    with pytest.raises(HeadError, match="write queries:"):
        selfspec.wrap(model, f"eagle:{assistant}")
    with pytest.raises(HeadError, match="there is no folder"):
        selfspec.wrap(model, f"eagle:{tmp_path / 'nowhere'}")


def test_a_vocabulary_that_is_mapped_wrongly_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    folder = published_heads.eagle3(tmp_path, model)
    file = Path(folder) / "model.safetensors"
    weights = load_file(file)
    tokens = weights["t2d"].nonzero()[:, 0]
    others = weights["t2d"].roll(1)
    # Ids in the place of differences, a token of no model, and those of another head.
    changes = [{"d2t": tokens}, {"d2t": weights["d2t"].roll(1)}, {"d2t": weights["d2t"] + 1000}, {"t2d": others}]
    for change in changes:
        save_file({**weights, **change}, file)
        with pytest.raises(HeadError, match=r"to none of this model|name different tokens"):
            selfspec.wrap(model, f"eagle:{folder}").generate(PROMPTS[0], max_new_tokens=8)
    save_file({name: weight for name, weight in weights.items() if name not in ("d2t", "t2d")}, file)
    with pytest.raises(HeadError, match="lacks d2t, which says which"):
        selfspec.wrap(model, f"eagle:{folder}")


def test_damaged_folders_are_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    folder = Path(published_heads.eagle3(tmp_path / "a", model))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-40])
    with pytest.raises(HeadError, match="truncated or corrupt"):
        selfspec.wrap(model, f"eagle:{folder}")
    (folder / "model.safetensors").unlink()
    with pytest.raises(HeadError, match="no weights"):
        selfspec.wrap(model, f"eagle:{folder}")
    index = {"weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(HeadError, match="lacks 1 of 1 weight files"):
        selfspec.wrap(model, f"eagle:{folder}")
    (folder / "config.json").write_text("[")
    with pytest.raises(HeadError, match="cannot be read"):
        selfspec.wrap(model, f"eagle:{folder}")


class Runs:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit",)


def test_a_pickle_of_tensors_is_read_and_one_with_code_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    folder = Path(published_heads.eagle1(tmp_path, model))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    spec = selfspec.wrap(model, f"eagle:{folder}", draft_length=3)
    assert_rows_are_stock(model, spec, PROMPTS, max_new_tokens=12, eos_token_id=7)
    torch.save({**weights, "fc.weight": Runs()}, folder / "pytorch_model.bin")
    with pytest.raises(HeadError, match="would run code"):
        selfspec.wrap(model, f"eagle:{folder}")
