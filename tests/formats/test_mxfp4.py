"""4-bit floats: near the weight, exact where it has their values, saved, and a draft by their name."""

from __future__ import annotations

from pathlib import Path

import torch

import selfspec
from helpers import tiny
from selfspec.formats.mxfp4 import Mxfp4


def test_values_that_it_has_are_kept() -> None:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -6.0, -3.0, 4.0]).repeat(8)[:64]
    weight = torch.stack([values, values * 2.0**-9])
    layer = Mxfp4.layer(Mxfp4().pack(weight, torch.ones(64)), None, torch.float32)
    assert torch.equal(layer.join(), weight)
    assert layer.nbytes == Mxfp4().nbytes(weight.shape) == 2 * 32 + 2 * 2 + 4 * 64


def test_products_are_near_the_layers_own() -> None:
    torch.manual_seed(0)
    layer, states = torch.nn.Linear(256, 96), torch.randn(2, 3, 256)
    low = Mxfp4.layer(Mxfp4().pack(layer.weight), layer.bias, torch.float32)
    assert 0 < (low(states) - layer(states)).norm() / layer(states).norm() < 0.2


def test_it_drafts_by_its_name_and_from_a_file(tmp_path: Path) -> None:
    model, ids = tiny.llama(hidden_size=64, intermediate_size=128, dtype=torch.float32), tiny.prompt(9, 2)
    wanted = model.generate(ids, max_new_tokens=24, do_sample=False)
    spec = selfspec.wrap(model, "mxfp4", draft_length=3)
    spec.draft.save(tmp_path / "m", model)
    for each in (spec, selfspec.wrap(model, f"mxfp4:{tmp_path / 'm'}", draft_length=3)):
        output = each.generate(ids, max_new_tokens=24, do_sample=False)
        assert torch.equal(output.sequences, wanted)
        assert output.stats.acceptance_rate > 0.3
