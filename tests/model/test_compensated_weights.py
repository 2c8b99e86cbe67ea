"""Weights of a model compensated on texts: on what each layer is given there, some layers at a time."""

from __future__ import annotations

import pytest
import torch

from helpers import tiny
from selfspec.draft import LowPrecision
from selfspec.errors import DraftConfigError
from selfspec.formats.int4 import Int4
from selfspec.model import substitute_file
from selfspec.model.registry import find_adapter
from selfspec.model.substitute_file import packed_weights
from selfspec.model.substitutes import weights_of

FOUR = Int4()
TEXTS = [tiny.prompt(12, 2), tiny.prompt(9, 1)]


def test_each_layer_is_rounded_by_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama(hidden_size=64, intermediate_size=128, dtype=torch.float32)
    weights = weights_of(model, find_adapter(model), LowPrecision(4).path(len(model.model.layers)))
    found = dict(packed_weights(model, weights, FOUR, TEXTS))
    assert list(found) == [name for name, _ in weights]
    # The head is given the last states.
    states = torch.cat([model.model(text).last_hidden_state.flatten(0, 1) for text in TEXTS]).detach()
    wanted = FOUR.pack_for(model.lm_head.weight, states.t() @ states)
    assert (found["lm_head.weight"]["levels"] != wanted["levels"]).float().mean() < 0.01
    assert (found["lm_head.weight"]["levels"] != FOUR.pack(model.lm_head.weight)["levels"]).float().mean() > 0.05
    assert not any(module._forward_pre_hooks for module in model.modules())
    # With moments of one layer at a time.
    monkeypatch.setattr(substitute_file, "_BYTES_AT_ONCE", 1)
    for name, rounded in packed_weights(model, weights, FOUR, TEXTS):
        assert all(torch.equal(values, found[name].parts[part]) for part, values in rounded.parts.items())


def test_experts_and_layers_that_are_not_run_have_fitted_scales() -> None:
    model = tiny.llama(hidden_size=64, intermediate_size=128, dtype=torch.float32)
    model.spare, experts = torch.nn.Linear(64, 32), torch.randn(2, 32, 64)
    found = dict(packed_weights(model, [("spare.weight", model.spare.weight), ("e", experts)], FOUR, TEXTS))
    for name, weight in (("spare.weight", model.spare.weight), ("e", experts)):
        assert torch.equal(found[name]["levels"], FOUR.pack(weight)["levels"])


def test_texts_for_8_bits_are_refused(tmp_path: object) -> None:
    model = tiny.llama(hidden_size=64, intermediate_size=128)
    with pytest.raises(DraftConfigError, match="texts serve 4 bits"):
        LowPrecision(8).save(f"{tmp_path}/x", model, texts=TEXTS)
