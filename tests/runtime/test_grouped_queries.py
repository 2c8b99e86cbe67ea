"""Attention that shares key heads without copying them: the same bits, and no copy of what the cache holds."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from helpers import tiny
from helpers.bench import Bench
from helpers.snapshot import Snapshot
from selfspec.adapters import ADAPTERS
from selfspec.cache.shared_cache import SharedCache
from selfspec.runtime.grouped_queries import for_grouped_queries


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_the_same_bits(architecture: str, dtype: torch.dtype) -> None:
    model = tiny.BUILDERS[architecture](dtype=dtype)
    for width, masked in itertools.product((1, 2, 5), (False, True)):
        ids, given = tiny.prompt(width, batch=2), None
        if masked:
            given = torch.ones(width, width, dtype=torch.bool).tril().expand(2, 1, -1, -1)
            if getattr(model.config, "layer_types", None):
                given = dict.fromkeys(model.config.layer_types, given)  # type: ignore[assignment]
        expected = model(ids, attention_mask=given, use_cache=False).logits
        assert torch.equal(for_grouped_queries(model)(ids, attention_mask=given, use_cache=False).logits, expected)


def test_the_model_stays_as_it_is(llama: PreTrainedModel) -> None:
    before = Snapshot(llama)
    view = for_grouped_queries(llama)
    assert view is not llama
    assert {id(weight) for weight in view.parameters()} == {id(weight) for weight in llama.parameters()}
    before.assert_same(llama)


def test_without_groups_or_on_another_kernel_it_is_the_model_itself() -> None:
    for model in (tiny.gpt2(), tiny.llama(attention="eager"), tiny.llama(num_key_value_heads=4)):
        assert for_grouped_queries(model) is model


def test_what_replaces_a_forward_is_left_alone(llama: PreTrainedModel) -> None:
    for layer in llama.model.layers:
        layer.self_attn.forward = layer.self_attn.forward
    assert for_grouped_queries(llama) is llama


@torch.no_grad()
def test_nothing_of_the_cache_is_copied() -> None:
    past, width = 40, 3
    model = tiny.llama()
    cache = SharedCache(tiny.DEPTH, batch=1, limit=64, slack=4, device=torch.device("cpu"))
    bench = Bench(model, ADAPTERS["llama"], cache, tiny.prompt(past + width), past)

    class Copies(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            output = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.clone.default:
                self.largest = max(self.largest, output.numel())
            return output

    whole = (past + width) * model.config.hidden_size
    with Copies() as stock:  # type: ignore[no-untyped-call]
        every = torch.ones(1, 1, past + width, past + width, dtype=torch.bool)
        model(tiny.prompt(past + width), attention_mask=every.tril())
    assert stock.largest >= whole
    with Copies() as ours:  # type: ignore[no-untyped-call]
        bench.logits(bench.full)
    assert ours.largest < whole
