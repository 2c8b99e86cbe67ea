"""Packed weights: the same products, the same text, the same checkpoint, and a way back to the bit."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.captures import Again
from helpers.proving import ticking
from helpers.snapshot import Snapshot
from selfspec.model.fingerprint import fingerprint, plain
from selfspec.runtime import pack, unpack
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.packed import PackedLinear, packable_dtypes, packed_layers

DTYPES = packable_dtypes()


def _model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return tiny.llama().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_products_are_the_same(dtype: torch.dtype) -> None:
    shapes: list[tuple[int, ...]] = [(1,), (3,), (1, 4), (2, 5), (2, 1, 2), (0,)]
    for shape, bias in itertools.product(shapes, (True, False)):
        linear = nn.Linear(24, 40, bias=bias).to(dtype)
        states = torch.randn(*shape, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
        expected = linear(states)
        PackedLinear.take(linear)
        assert linear.weight.is_mkldnn
        found = linear(states)
        assert found.shape == expected.shape
        close = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(found, expected, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpacking_brings_the_model_back_to_the_bit(dtype: torch.dtype) -> None:
    model = _model(dtype)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    asked = {name: weight.requires_grad for name, weight in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    pack(model)
    assert any(True for _ in packed_layers(model))
    unpack(model)
    assert [type(module) for module in model.modules()] == kinds
    assert {name: weight.requires_grad for name, weight in model.named_parameters()} == asked
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name
    unpack(model)  # nothing to do, and no error


def test_memory_does_not_grow_by_the_weights() -> None:
    model = _model()
    plain_bytes = sum(weight.nbytes for weight in model.parameters())
    pack(model)
    held = sum(weight.nbytes for weight in model.parameters())
    assert held == plain_bytes  # the plain weight is not kept beside the packed one
    for layer in packed_layers(model):
        assert [name for name, _ in layer.named_parameters()] in (["weight"], ["weight", "bias"])
        assert not any(isinstance(value, Tensor) for value in vars(layer).values())


def test_a_head_tied_to_the_embeddings_stays_plain() -> None:
    model = tiny.llama(tie_word_embeddings=True).float()
    pack(model)
    assert not isinstance(model.get_output_embeddings(), PackedLinear)
    assert not model.get_input_embeddings().weight.is_mkldnn
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_an_untied_head_is_packed() -> None:
    model = tiny.llama(tie_word_embeddings=False).float()
    # A notebook would show whatever it returned.
    assert pack(model) is None
    assert isinstance(model.get_output_embeddings(), PackedLinear)


@pytest.mark.parametrize(
    "draft", [None, selfspec.drafts.EarlyExit(2), selfspec.drafts.LayerSkip(attention=[1], mlp=[2])]
)
def test_greedy_text_is_the_packed_models_own(draft: selfspec.drafts.Drafter | None) -> None:
    model = _model()
    pack(model)
    prompt = tiny.prompt(8)
    expected = model.generate(prompt, max_new_tokens=30, do_sample=False)
    spec = selfspec.wrap(model, draft, draft_length=2, runtime=Again())
    spec.programs = GraphCache(spec.runtime, ticking())
    for _ in range(2):
        assert torch.equal(spec.generate(prompt, max_new_tokens=30, do_sample=False).sequences, expected)
    # No program reads packed weights.
    assert not spec.programs.proved


def test_a_checkpoint_is_saved_with_plain_weights(tmp_path: Path) -> None:
    model = _model()
    before = fingerprint(model)
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    pack(model)
    assert fingerprint(model) == before
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, expected[name]), name


def test_a_copy_is_packed_and_its_own() -> None:
    model = _model()
    pack(model)
    twin = copy.deepcopy(model)
    assert len(list(packed_layers(twin))) == len(list(packed_layers(model)))
    unpack(twin)
    assert any(True for _ in packed_layers(model))
    for name, weight in twin.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


def test_moved_to_another_dtype_it_is_packed_anew_where_it_can_be() -> None:
    model = _model()
    pack(model)
    model.to(torch.bfloat16)
    assert all(layer.weight.dtype == torch.bfloat16 for layer in packed_layers(model))
    assert any(True for _ in packed_layers(model)) == (torch.bfloat16 in DTYPES)
    model.to(torch.float64)
    assert not any(True for _ in packed_layers(model))
    model.generate(tiny.prompt(4), max_new_tokens=2, do_sample=False)


def test_it_cannot_be_trained() -> None:
    linear = nn.Linear(8, 8)
    PackedLinear.take(linear)
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="unpack"):
        linear(torch.randn(2, 8, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_models_without_a_layer_to_pack_are_refused(dtype: torch.dtype) -> None:
    model = _model(dtype)
    before = Snapshot(model)
    with pytest.raises(selfspec.errors.UnsupportedModelError, match="no linear layer"):
        pack(model)
    before.assert_same(model)


def test_bfloat16_is_refused_where_the_processor_has_no_kernels_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.runtime.packed.packable_dtypes", lambda: (torch.float32,))
    with pytest.raises(selfspec.errors.UnsupportedModelError, match="in float32, with"):
        pack(_model(torch.bfloat16))


def test_a_model_that_reads_weights_itself_is_refused_and_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    mlp = type(model.model.layers[0].mlp)
    monkeypatch.setattr(
        mlp, "forward", lambda self, states: states @ self.up_proj.weight.t() @ self.down_proj.weight.t()
    )
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(selfspec.errors.UnsupportedModelError, match="leave it out"):
        pack(model)
    assert not any(True for _ in packed_layers(model))
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_a_torch_without_onednn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="oneDNN"):
        pack(_model())


def test_plain_gives_the_weight_of_either_kind() -> None:
    linear = nn.Linear(8, 4)
    weight = linear.weight.detach().clone()
    assert plain(linear.weight) is linear.weight
    PackedLinear.take(linear)
    assert torch.equal(plain(linear.weight), weight)
