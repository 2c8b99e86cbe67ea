"""A draft's logits against a pruned copy of the model that `transformers` runs by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from helpers import tiny
from helpers.reference import zeroed
from selfspec.draft import EarlyExit, LayerSkip
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import DraftConfigError, PromptError
from selfspec.model.registry import find_adapter
from selfspec.tools.verify.pruned import draft_logits, pruned_logits

BLOCK = 5
DRAFTS = (EarlyExit(1), EarlyExit(3), LayerSkip(attention=[1]), LayerSkip(mlp=[2]), LayerSkip(layers=[0, 2]))
MODELS = {"llama": tiny.llama, "mistral": tiny.mistral, "gpt2": tiny.gpt2, "qwen3": tiny.qwen3}


def _both(model: PreTrainedModel, draft: LayerPathDrafter, of: LayerPathDrafter) -> tuple[torch.Tensor, torch.Tensor]:
    ids = tiny.prompt(14, batch=2)
    left_out = of.path(model.config.num_hidden_layers).skipped
    return draft_logits(model, draft, ids, BLOCK), pruned_logits(model, zeroed(model, left_out), ids, BLOCK)


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
@pytest.mark.parametrize("architecture", MODELS)
def test_a_right_adapter_drafts_as_the_pruned_model(architecture: str, draft: LayerPathDrafter) -> None:
    drafted, pruned = _both(MODELS[architecture](), draft, draft)
    assert drafted.shape == (2, BLOCK, tiny.VOCABULARY)
    torch.testing.assert_close(drafted, pruned)


def test_another_draft_is_told_apart() -> None:
    drafted, pruned = _both(tiny.llama(), LayerSkip(mlp=[2]), LayerSkip(mlp=[1]))
    assert (drafted - pruned).abs().max() > 1e-3


@pytest.mark.parametrize(("part", "draft"), [("without_mlp", DRAFTS[3]), ("without_attention", DRAFTS[2])], ids=str)
def test_a_wrong_adapter_is_told(part: str, draft: LayerPathDrafter) -> None:
    model = tiny.llama()
    ids = tiny.prompt(14)
    pruned = pruned_logits(model, zeroed(model, draft.path(tiny.DEPTH).skipped), ids, BLOCK)
    adapter = find_adapter(model)
    right = draft_logits(model, draft, ids, BLOCK, adapter=adapter)
    torch.testing.assert_close(right, pruned)
    wrong = draft_logits(model, draft, ids, BLOCK, adapter=replace(adapter, **{part: "input"}))  # type: ignore[arg-type]
    assert (wrong - pruned).abs().max() > 1e-3


@pytest.mark.parametrize("block", [0, 14, 15, -1])
def test_blocks_that_do_not_fit_are_refused(block: int) -> None:
    model = tiny.llama()
    with pytest.raises(PromptError, match="does not fit"):
        draft_logits(model, EarlyExit(1), tiny.prompt(14), block)
    with pytest.raises(PromptError, match="does not fit"):
        pruned_logits(model, model, tiny.prompt(14), block)


def test_drafts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DraftConfigError, match="out of range"):
        draft_logits(tiny.llama(), EarlyExit(9), tiny.prompt(14), BLOCK)
