"""Drafts with the model's own weights in fewer bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import selfspec
from helpers import tiny
from selfspec.draft.named import draft_name, parse_draft
from selfspec.errors import DraftConfigError, UnsupportedOptionError
from selfspec.kernels import native
from selfspec.kernels.low_bits import EightBitsLinear, FourBitsLinear
from selfspec.measure.teacher_forced.paths import DraftPath
from selfspec.model.layer_path import LayerPath, Part, Precision, Sublayer
from selfspec.model.substitutes import Substitutes

EIGHT, FOUR = Precision(8, 32), Precision(4, 32)
DRAFTS = [
    selfspec.LowPrecision(),
    selfspec.LowPrecision(4),
    selfspec.LowPrecision(8, layers=[3, 4]),
    selfspec.LowPrecision(8, exit=3),
    selfspec.LowPrecision(8, head=False),
    selfspec.Cascade(selfspec.PromptLookup(), selfspec.LowPrecision()),
    selfspec.ReducedVocabulary(selfspec.LowPrecision(), tuple(range(0, tiny.VOCABULARY, 2))),
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Large enough for the kernels."""
    return tiny.llama(num_hidden_layers=5, hidden_size=64, intermediate_size=128, dtype=torch.float32)


@pytest.mark.parametrize("draft", DRAFTS, ids=draft_name)
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_text_is_the_stock_models(model: PreTrainedModel, draft: selfspec.Drafter, rows: int) -> None:
    prompts = tiny.prompt(9, rows)
    spec = selfspec.wrap(model, draft, draft_length=3)
    wanted = model.generate(prompts, max_new_tokens=24, do_sample=False)
    for _ in range(2):
        output = spec.generate(prompts, max_new_tokens=24, do_sample=False)
        assert torch.equal(output.sequences, wanted)
        assert output.stats.drafted


def test_eight_bits_draft_almost_as_the_model_does(model: PreTrainedModel) -> None:
    spec = selfspec.wrap(model, selfspec.LowPrecision(), draft_length=3)
    output = spec.generate(tiny.prompt(9, 6), max_new_tokens=48, do_sample=True, seed=0)
    assert output.stats.acceptance_rate > 0.9


def test_a_model_without_a_layer_that_a_kernel_takes_is_refused(model: PreTrainedModel) -> None:
    own = copy.deepcopy(model)
    for child in own.model.layers.modules():
        if type(child) is nn.Linear:
            child.__class__ = Other
    spec = selfspec.wrap(own, selfspec.LowPrecision(4), draft_length=3)
    with pytest.raises(DraftConfigError, match=r"no layer .* in 4 bits.*draft with"):
        spec.generate(tiny.prompt(9), max_new_tokens=8)


class Other(nn.Linear):
    """A layer whose product may be another."""


@pytest.mark.parametrize("architecture", [name for name in tiny.BUILDERS if name != "llama"])
def test_other_architectures_keep_their_text(architecture: str) -> None:
    stock, prompt = tiny.BUILDERS[architecture](), tiny.prompt(9)
    wanted = stock.generate(prompt, max_new_tokens=16, do_sample=False)
    spec = selfspec.wrap(stock, selfspec.LowPrecision(), draft_length=3)
    assert torch.equal(spec.generate(prompt, max_new_tokens=16, do_sample=False).sequences, wanted)


@pytest.mark.parametrize("make", [lambda w, b: EightBitsLinear(w, b), lambda w, b: FourBitsLinear(w, b, 32)])
@pytest.mark.parametrize("biased", [True, False])
def test_products_are_near_the_layers_own(make: Any, biased: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 96, bias=biased)
    low = make(layer.weight, layer.bias)
    states = torch.randn(2, 3, 64)
    error = (low(states) - layer(states)).abs().mean() / layer(states).abs().mean()
    assert low(states).shape == (2, 3, 96)
    assert 0 < error < (0.02 if isinstance(low, EightBitsLinear) else 0.15)
    assert low.nbytes < layer.weight.nbytes * (0.27 if isinstance(low, EightBitsLinear) else 0.19)


def test_a_weight_of_zeros_gives_zeros() -> None:
    for low in (EightBitsLinear(torch.zeros(32, 64), None), FourBitsLinear(torch.zeros(32, 64), None, 32)):
        assert not low(torch.randn(1, 64)).any()


def test_substitutes_are_made_once_and_again_after_a_change(model: PreTrainedModel) -> None:
    substitutes, layer = Substitutes(), model.model.layers[0].mlp.up_proj
    first = substitutes.within(layer, "up", EIGHT)
    assert substitutes.within(layer, "up", EIGHT) is first
    assert substitutes.within(layer, "up", FOUR) is not first
    with torch.no_grad():
        layer.weight.mul_(1.0)
    second = substitutes.within(layer, "up", EIGHT)
    assert second is not first
    layer.weight.data = layer.weight.data.clone()
    assert substitutes.within(layer, "up", EIGHT) is not second
    assert substitutes.nbytes > 0


@pytest.mark.parametrize("precision", [EIGHT, FOUR])
@torch.no_grad()
def test_weights_laid_out_by_columns_have_a_substitute(precision: Precision) -> None:
    layer = Conv1D(64, 96)
    substitute = Substitutes().within(layer, "columns", precision)
    assert isinstance(substitute, EightBitsLinear | FourBitsLinear)
    states = torch.randn(3, 96)
    torch.testing.assert_close(substitute(states), layer(states), rtol=0.2, atol=0.05)


def test_what_no_kernel_takes_runs_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load_kernels", lambda: False)
    odd = nn.Linear(7, 5)
    assert Substitutes().within(odd, "odd", FOUR) is odd
    # With 172 inputs ATen's kernel for 8 bits ends the process, with 24 it is wrong.
    for inputs in (172, 24):
        odd = nn.Linear(inputs, 8)
        assert Substitutes().within(odd, "odd", EIGHT) is odd


def test_the_model_keeps_its_weights(model: PreTrainedModel) -> None:
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    selfspec.wrap(model, selfspec.LowPrecision(4), draft_length=2).generate(tiny.prompt(5), max_new_tokens=8)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_verification_resumes_where_substitutes_begin() -> None:
    path = selfspec.LowPrecision(8, layers=[2, 4]).path(5)
    assert path.resume_point == Sublayer(2, Part.ATTENTION)
    assert selfspec.LowPrecision().path(5).resume_point is None
    assert selfspec.LowPrecision(exit=3).path(5).exit_point == Sublayer(3, Part.ATTENTION)
    assert path.runs(Sublayer(3, Part.MLP))
    assert LayerPath.full(5).precision is None


def test_its_cost_is_that_of_the_bytes_it_reads(model: PreTrainedModel) -> None:
    adapter = selfspec.wrap(model).adapter
    eight, four = (selfspec.LowPrecision(bits).cost(model, adapter) for bits in (8, 4))
    assert eight == pytest.approx(0.25, abs=0.02)
    assert four == pytest.approx(0.125, abs=0.02)
    assert selfspec.LowPrecision(exit=2).cost(model, adapter) < eight


@pytest.mark.parametrize("name", ["int8", "int4", "int4+exit:3", "lookup+int8", "lookup+int4+exit:2"])
def test_names(name: str) -> None:
    assert draft_name(parse_draft(name)) == name


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: selfspec.LowPrecision(3), "8 and 4"),
        (lambda: selfspec.LowPrecision(True), "8 and 4"),
        (lambda: selfspec.LowPrecision(4, group_size=48), "group_size"),
        (lambda: selfspec.LowPrecision(layers=[]), "at least one"),
        (lambda: selfspec.LowPrecision(layers="3"), "list of layer numbers"),  # type: ignore[arg-type]
        (lambda: selfspec.LowPrecision(layers=[1.5]), "list of layer numbers"),  # type: ignore[list-item]
        (lambda: selfspec.wrap(tiny.llama(), selfspec.LowPrecision(layers=[99])), "out of range"),
        (lambda: selfspec.wrap(tiny.llama(), selfspec.LowPrecision(exit=99)), "out of range"),
        (lambda: selfspec.wrap(tiny.llama(), selfspec.LowPrecision(layers=[3], exit=2)), "leaves none"),
        (lambda: parse_draft("int3"), "not understood"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, match: str) -> None:
    with pytest.raises(DraftConfigError, match=match):
        make()


def test_it_cannot_be_teacher_forced() -> None:
    with pytest.raises(UnsupportedOptionError, match="fewer bits"):
        DraftPath(selfspec.LowPrecision().path(5))
