"""The fingerprint of weights: any change of any of them makes another, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.errors import UnsupportedModelError
from selfspec.measure.summary import describe
from selfspec.model.identity import fingerprint, vocabulary_size, weight_of
from selfspec.serve.row_request import RowRequest


def _rows_swapped(model: PreTrainedModel) -> None:
    weight = model.get_input_embeddings().weight
    weight[[11, 999]] = weight[[999, 11]]


def _adapter_merged(model: PreTrainedModel) -> None:
    weight = model.model.layers[1].self_attn.q_proj.weight
    down, up = (torch.randn(2, size, generator=torch.Generator().manual_seed(size)) for size in weight.shape)
    weight += 1e-2 * weight.abs().mean() * (down.T @ up).to(weight)


CHANGES: dict[str, Callable[[PreTrainedModel], object]] = {
    "value": lambda model: model.get_input_embeddings().weight[1234, 5].mul_(1.5),
    "rows swapped": _rows_swapped,
    "adapter merged": _adapter_merged,
    "buffer": lambda model: model.model.layers[1].packed[3, 4].add_(1),
    "last byte": lambda model: model.model.layers[1].packed[-1, -1].add_(1),
}


def _model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """With a head of its own and packed weights as quantised checkpoints have them, of an odd number of bytes."""
    model = tiny.llama(vocab_size=20_000, dtype=dtype)
    packed = torch.randint(0, 255, (7, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    model.model.layers[1].register_buffer("packed", packed)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_a_weight_makes_another(change: str, dtype: torch.dtype) -> None:
    model = _model(dtype)
    before = fingerprint(model)
    assert fingerprint(_model(dtype)) == before
    with torch.no_grad():
        CHANGES[change](model)
    assert fingerprint(model) != before


def test_a_checkpoint_has_one_in_whatever_dtype_it_is_loaded(tmp_path: Path) -> None:
    model = tiny.llama(dtype=torch.bfloat16)
    before = fingerprint(model)
    model.save_pretrained(tmp_path)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert fingerprint(type(model).from_pretrained(tmp_path, dtype=dtype)) == before


def test_rounded_weights_are_others_where_that_counts() -> None:
    model = tiny.llama(dtype=torch.float32)
    before = [fingerprint(model, dtype) for dtype in (torch.bfloat16, torch.float32)]
    model.to(torch.bfloat16).float()
    after = [fingerprint(model, dtype) for dtype in (torch.bfloat16, torch.float32)]
    assert after[0] == before[0]
    assert after[1] != before[1]


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_another_adapter_that_runs_makes_another() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny.llama(), config, "one")
    model.add_adapter("two", config)
    found = []
    for name in ("one", "two"):
        model.set_adapter(name)
        found.append(fingerprint(model.get_base_model()))
    with model.disable_adapter():
        found.append(fingerprint(model.get_base_model()))
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scale_layer(0.5)
    found.append(fingerprint(model.get_base_model()))
    found.append(fingerprint(model.merge_and_unload()))
    assert len({*found}) == len(found)


def test_what_is_made_while_it_runs_does_not_count() -> None:
    model = tiny.llama()
    before = fingerprint(model)
    model.model.layers[0].register_buffer("scratch", torch.rand(3), persistent=False)
    model(tiny.prompt(4))
    assert fingerprint(model) == before


def test_weights_that_are_not_there_are_refused() -> None:
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="bias is not in memory"):
        fingerprint(layer)


class CastOutput(nn.Sequential):
    """Gives logits in float32, as PEFT's cast of outputs does."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states).float()  # type: ignore[no-any-return, no-untyped-call]


class Wrapped(nn.Module):
    """Runs what it wraps, and has no weight of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: Tensor) -> Tensor:
        return self.inner(given)  # type: ignore[no-any-return]


WRAPS: dict[str, Callable[[PreTrainedModel], None]] = {
    "head": lambda model: model.set_output_embeddings(CastOutput(model.get_output_embeddings())),
    "embedding": lambda model: model.set_input_embeddings(Wrapped(model.get_input_embeddings())),
}


@pytest.mark.parametrize("draft", [None, "exit:2", "skip:attn=1", "int8", "int4+exit:2", "lookup", "del:1-3"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_wrapped_embeddings_and_heads_decode_as_ever(wrap: str, draft: str | None) -> None:
    model = tiny.llama()
    WRAPS[wrap](model)
    expected = model.generate(tiny.prompt(9), max_new_tokens=16, do_sample=False)
    spec = selfspec.wrap(model, draft, draft_length=3)
    assert torch.equal(spec.generate(tiny.prompt(9), max_new_tokens=16, do_sample=False).sequences, expected)


@pytest.mark.parametrize("wrap", WRAPS)
def test_sizes_are_those_of_what_is_wrapped(wrap: str) -> None:
    plain, model = tiny.llama(), tiny.llama()
    WRAPS[wrap](model)
    assert vocabulary_size(model) == vocabulary_size(plain)
    for get in ("get_input_embeddings", "get_output_embeddings"):
        assert weight_of(getattr(model, get)()).shape == getattr(plain, get)().weight.shape
    assert describe(model).vocabulary == plain.config.vocab_size
    with selfspec.Engine(selfspec.wrap(model, "lookup")) as engine:
        request = RowRequest(tuple(tiny.prompt(9)[0].tolist()), 4)
        assert len(engine.submit(request).tokens()) == 4


def test_a_module_without_weights_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="Identity has no weight"):
        weight_of(nn.Identity())
