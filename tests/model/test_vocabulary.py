"""Embeddings and heads that another module wraps are those of the model inside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.errors import UnsupportedModelError
from selfspec.model.identity import vocabulary_size, weight_of
from selfspec.model.summary import describe
from selfspec.serve.row_request import RowRequest


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


def _wrap_head(model: PreTrainedModel) -> None:
    model.set_output_embeddings(CastOutput(model.get_output_embeddings()))


def _wrap_embedding(model: PreTrainedModel) -> None:
    model.set_input_embeddings(Wrapped(model.get_input_embeddings()))


@pytest.mark.parametrize("draft", [None, "exit:2", "skip:attn=1", "int8", "int4+exit:2", "lookup", "del:1-3"])
@pytest.mark.parametrize("wrap", [_wrap_head, _wrap_embedding])
def test_wrapped_embeddings_and_heads_decode_as_ever(
    wrap: Callable[[PreTrainedModel], None], draft: str | None
) -> None:
    model = tiny.llama()
    wrap(model)
    expected = model.generate(tiny.prompt(9), max_new_tokens=16, do_sample=False)
    spec = selfspec.wrap(model, draft, draft_length=3)
    assert torch.equal(spec.generate(tiny.prompt(9), max_new_tokens=16, do_sample=False).sequences, expected)


@pytest.mark.parametrize("wrap", [_wrap_head, _wrap_embedding])
def test_sizes_are_those_of_what_is_wrapped(wrap: Callable[[PreTrainedModel], None]) -> None:
    plain, model = tiny.llama(), tiny.llama()
    wrap(model)
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
