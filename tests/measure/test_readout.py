"""Reading the exits of a training model, against a model that has only the layers before the exit."""

from __future__ import annotations

import pytest
import torch

from helpers import tiny
from helpers.reference import with_layers
from selfspec.measure.acceptance import Readout
from selfspec.model.registry import find_adapter
from selfspec.tools.train.layerskip import layer_dropout


@pytest.mark.parametrize("exit_layer", [1, 3])
def test_an_exit_says_what_the_first_layers_alone_would(architecture: str, exit_layer: int) -> None:
    model = tiny.BUILDERS[architecture]()
    ids = tiny.prompt(9, batch=2)
    readout = Readout(model, find_adapter(model))
    with torch.no_grad(), readout.recorded([exit_layer]) as states:
        full = model(input_ids=ids).logits
    with torch.no_grad():
        expected = with_layers(model, range(exit_layer))(input_ids=ids).logits
        torch.testing.assert_close(readout.logits(states[exit_layer]), expected)
        torch.testing.assert_close(model(input_ids=ids).logits, full)


def test_the_exits_loss_teaches_the_layers_before_it_and_the_head_but_none_behind() -> None:
    model = tiny.llama()
    readout = Readout(model, find_adapter(model))
    with readout.recorded([2]) as states:
        model(input_ids=tiny.prompt(5))
    readout.logits(states[2]).sum().backward()
    taught = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert {"model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"} <= taught
    assert not any(name.startswith(("model.layers.2", "model.layers.3")) for name in taught)


def test_recording_ends_with_its_block_even_after_an_error() -> None:
    model = tiny.llama()
    readout = Readout(model, find_adapter(model))
    with pytest.raises(ZeroDivisionError), readout.recorded([1]) as states:
        raise ZeroDivisionError
    model(input_ids=tiny.prompt(3))
    assert states == {}


def test_dropout_skips_layers_by_sample(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    ids = tiny.prompt(6, batch=8)
    layers = find_adapter(model).decoder_layers(model)
    with torch.no_grad():
        kept, skipped = model(input_ids=ids).logits, with_layers(model, [0, 1, 3])(input_ids=ids).logits
        torch.manual_seed(3)
        with layer_dropout(layers, [0.0, 0.0, 0.5, 0.0]):
            dropped = model(input_ids=ids).logits
    as_kept = torch.stack([torch.allclose(a, b) * torch.ones(()) for a, b in zip(dropped, kept, strict=True)])
    as_skipped = torch.stack([torch.allclose(a, b) * torch.ones(()) for a, b in zip(dropped, skipped, strict=True)])
    torch.testing.assert_close(as_kept + as_skipped, torch.ones(8))
    assert 0 < as_kept.sum() < 8


def test_dropout_ends_with_its_block() -> None:
    model = tiny.llama()
    ids = tiny.prompt(4)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with layer_dropout(find_adapter(model).decoder_layers(model), [0.9] * 4):
            model(input_ids=ids)
        torch.testing.assert_close(model(input_ids=ids).logits, before)
