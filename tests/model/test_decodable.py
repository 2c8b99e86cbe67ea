"""What cannot be decoded is refused by name: layers on several devices, layers without a place in the cache."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.errors import UnsupportedModelError
from selfspec.model.decodable import check_decodable
from selfspec.model.registry import find_adapter


def test_layers_on_several_devices_are_refused(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    # Stands for a weight on a device that this machine lacks.
    elsewhere = SimpleNamespace(device=torch.device("cuda:1"))
    monkeypatch.setitem(llama.model.norm._parameters, "weight", elsewhere)
    with pytest.raises(UnsupportedModelError, match=r"lie on cpu and cuda:1.*tp_plan"):
        check_decodable(llama, find_adapter(llama))


def _layers(model: PreTrainedModel) -> Any:
    return model.get_submodule(".".join(find_adapter(model).path(model)))


def _cut(model: PreTrainedModel) -> None:
    del _layers(model)[3:]


def _cut_and_said(model: PreTrainedModel) -> None:
    _cut(model)
    model.config.num_hidden_layers = 3


def _without_one(model: PreTrainedModel) -> None:
    del _layers(model)[1]


def _numbered_anew(model: PreTrainedModel) -> None:
    _without_one(model)
    for place, layer in enumerate(_layers(model)):
        for module in layer.modules():
            for name in {"layer_idx", "layer_id"} & vars(module).keys():
                setattr(module, name, place)
    model.config.num_hidden_layers = 3


def _in_another_order(model: PreTrainedModel) -> None:
    # Masks go by the place: only layers of one kind can change places, in the stock model as well.
    layers = _layers(model)
    layers[0], layers[1] = layers[1], layers[0]


@pytest.mark.parametrize("draft", [None, "exit:1", "int8", "lookup"])
@pytest.mark.parametrize("wrapped", ["before", "after"])
@pytest.mark.parametrize("prune", [_cut, _cut_and_said, _numbered_anew, _in_another_order])
def test_models_pruned_in_memory_decode_as_they_are(
    architecture: str, prune: Callable[[PreTrainedModel], None], wrapped: str, draft: str | None
) -> None:
    model = tiny.BUILDERS[architecture]()
    spec = selfspec.wrap(model, draft, draft_length=3) if wrapped == "before" else None
    if spec is not None:
        spec.generate(tiny.prompt(9), max_new_tokens=4)
    prune(model)
    spec = spec or selfspec.wrap(model, draft, draft_length=3)
    expected = model.generate(tiny.prompt(9), max_new_tokens=12, do_sample=False)
    assert torch.equal(spec.generate(tiny.prompt(9), max_new_tokens=12, do_sample=False).sequences, expected)


@pytest.mark.parametrize("wrapped", ["before", "after"])
@pytest.mark.parametrize(
    ("prune", "said"),
    [
        (_without_one, "layer_idx=.*there are 3 layers"),
        (lambda model: operator.setitem(_layers(model), 2, _layers(model)[1]), r"layer_idx=.*as [\w.]+\.1;"),
        (lambda model: setattr(model.config, "num_hidden_layers", 2), r"num_hidden_layers=2, and [\w.]+ has 4 layers"),
    ],
)
def test_layers_without_a_place_in_the_cache_are_refused(
    architecture: str, prune: Callable[[PreTrainedModel], None], said: str, wrapped: str
) -> None:
    model = tiny.BUILDERS[architecture]()
    spec = selfspec.wrap(model, "exit:1") if wrapped == "before" else None
    prune(model)
    with pytest.raises(UnsupportedModelError, match=said):
        (spec or selfspec.wrap(model, "exit:1")).generate(tiny.prompt(9), max_new_tokens=4)


PROMPT = 7
OPTIONS: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


def test_a_compiled_model_is_wrapped_by_what_is_inside(llama: PreTrainedModel) -> None:
    wanted = llama.generate(tiny.prompt(PROMPT), **OPTIONS)
    compiled: Any = torch.compile(llama, backend="eager")
    spec = selfspec.wrap(compiled, selfspec.drafts.EarlyExit(2), draft_length=3)
    assert spec.model is llama
    assert torch.equal(spec.generate(tiny.prompt(PROMPT), **OPTIONS).sequences, wanted)
    assert torch.equal(compiled.generate(tiny.prompt(PROMPT), custom_generate=spec, **OPTIONS), wanted)


def test_what_is_inside_a_compiled_module_must_be_a_causal_model() -> None:
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    with pytest.raises(UnsupportedModelError, match="Linear is not a transformers model"):
        selfspec.wrap(compiled)


def quantised(model: PreTrainedModel, dtype: torch.dtype) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=dtype)


def test_dynamic_quantisation_to_8_bits_is_refused() -> None:
    model = tiny.llama(dtype=torch.float32)
    early = selfspec.wrap(model, selfspec.drafts.EarlyExit(2))
    with pytest.raises(UnsupportedModelError, match=r"q_proj is a .*dynamic.*by the largest of all tokens in a pass"):
        selfspec.wrap(quantised(model, torch.qint8), selfspec.drafts.EarlyExit(2))
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)
    with pytest.raises(UnsupportedModelError, match=r"quantise the weights alone"):
        early.generate(tiny.prompt(PROMPT), **OPTIONS)


def test_dynamic_quantisation_to_16_bits_is_decoded() -> None:
    model = quantised(tiny.llama(dtype=torch.float32), torch.float16)
    wanted = model.generate(tiny.prompt(PROMPT, 2), **OPTIONS)
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    output = spec.generate(tiny.prompt(PROMPT, 2), **OPTIONS)
    assert torch.equal(output.sequences, wanted)
    assert output.stats.drafted > 0
