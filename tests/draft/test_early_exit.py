"""Early exit: which exits a network has, and what refusing the others says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.reference import with_layers
from selfspec.errors import DraftConfigError
from selfspec.model.layer_path import LayerPath, Part, Sublayer


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_the_draft_runs_the_layers_before_the_exit(layer: int) -> None:
    path = selfspec.drafts.EarlyExit(layer).path(4)
    assert path == LayerPath.up_to(4, Sublayer(layer, Part.ATTENTION))
    assert [n for n in range(4) if path.runs(Sublayer(n, Part.ATTENTION))] == list(range(layer))


@pytest.mark.parametrize("layer", [0, 4, 5, 100, -1, -4])
def test_an_exit_outside_the_network_is_refused_with_the_exits_there_are(llama: PreTrainedModel, layer: int) -> None:
    with pytest.raises(DraftConfigError, match=rf"exit layer {layer} .*4 layers, choose 1\.\.3"):
        selfspec.wrap(llama, selfspec.drafts.EarlyExit(layer), draft_length=4)


@pytest.mark.parametrize("layer", [True, False, 2.0, "2", None, [2], (1, 2), float("nan")])
def test_an_exit_that_is_no_integer_is_refused(llama: PreTrainedModel, layer: Any) -> None:
    with pytest.raises(DraftConfigError, match=r"must be an integer.*EarlyExit\(layer=4\)"):
        selfspec.wrap(llama, selfspec.drafts.EarlyExit(layer), draft_length=4)


def test_a_network_of_one_layer_has_no_exit() -> None:
    with pytest.raises(DraftConfigError, match="too few"):
        selfspec.wrap(tiny.llama(num_hidden_layers=1), selfspec.drafts.EarlyExit(1), draft_length=4)


def test_drafts_are_the_greedy_text_of_the_model_cut_there(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    for layer in (1, 3):
        cut = with_layers(model, range(layer))
        text = tiny.prompt(11)[0].tolist()
        spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(layer), draft_length=3)
        for chunk in spec.stream(tiny.prompt(11), max_new_tokens=12):
            (row,) = chunk.rows
            assert list(row.draft) == greedy_text(cut, text, len(row.draft))
            text += row.tokens
        assert len(text) == 23


def greedy_text(model: PreTrainedModel, prefix: list[int], length: int) -> list[int]:
    """The next tokens, each from a forward over all before it: no cache, no `generate`."""
    text = list(prefix)
    with torch.no_grad():
        for _ in range(length):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].float().argmax()))
    return text[len(prefix) :]


def test_it_is_a_value() -> None:
    assert selfspec.drafts.EarlyExit(2) == selfspec.drafts.EarlyExit(layer=2)
    assert hash(selfspec.drafts.EarlyExit(2)) == hash(selfspec.drafts.EarlyExit(2))
    assert selfspec.drafts.EarlyExit(2) != selfspec.drafts.EarlyExit(3)
    with pytest.raises(AttributeError):
        selfspec.drafts.EarlyExit(2).layer = 3  # type: ignore[misc]
