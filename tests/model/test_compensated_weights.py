"""Weights of a model compensated on texts: on what each layer is given there, some layers at a time."""

from __future__ import annotations

import pytest
import torch

from helpers import tiny
from selfspec.draft import LowPrecision
from selfspec.errors import DraftConfigError
from selfspec.kernels.rounded import Precision, round_weight
from selfspec.model import compensated_weights as compensating
from selfspec.model.compensated_weights import compensated_weights, round_compensated
from selfspec.model.registry import find_adapter
from selfspec.model.substitutes import weights_of

FOUR = Precision(4, 32)
TEXTS = [tiny.prompt(12, 2), tiny.prompt(9, 1)]


def test_each_layer_is_rounded_by_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama(hidden_size=64, intermediate_size=128, dtype=torch.float32)
    weights = weights_of(model, find_adapter(model), LowPrecision(4).path(len(model.model.layers)))
    found = dict(compensated_weights(model, weights, FOUR, TEXTS))
    assert list(found) == [name for name, _ in weights]
    # The head is given the last states.
    states = torch.cat([model.model(text).last_hidden_state.flatten(0, 1) for text in TEXTS]).detach()
    wanted = round_compensated(model.lm_head.weight, states.t() @ states, FOUR)
    assert (found["lm_head.weight"].levels != wanted.levels).float().mean() < 0.01
    assert (found["lm_head.weight"].levels != round_weight(model.lm_head.weight, FOUR).levels).float().mean() > 0.05
    assert not any(module._forward_pre_hooks for module in model.modules())
    # With moments of one layer at a time.
    monkeypatch.setattr(compensating, "_BYTES_AT_ONCE", 1)
    for name, rounded in compensated_weights(model, weights, FOUR, TEXTS):
        assert all(torch.equal(values, found[name].parts[part]) for part, values in rounded.parts.items())


def test_experts_and_layers_that_are_not_run_have_fitted_scales() -> None:
    model = tiny.llama(hidden_size=64, intermediate_size=128, dtype=torch.float32)
    model.spare, experts = torch.nn.Linear(64, 32), torch.randn(2, 32, 64)
    found = dict(compensated_weights(model, [("spare.weight", model.spare.weight), ("e", experts)], FOUR, TEXTS))
    for name, weight in (("spare.weight", model.spare.weight), ("e", experts)):
        assert torch.equal(found[name].levels, round_weight(weight, FOUR).levels)


def test_texts_for_8_bits_are_refused(tmp_path: object) -> None:
    model = tiny.llama(hidden_size=64, intermediate_size=128)
    with pytest.raises(DraftConfigError, match="texts serve 4 bits"):
        LowPrecision(8).save(f"{tmp_path}/x", model, texts=TEXTS)
