"""Linears of few rows: the same numbers, hooks and weights, and nothing of the model changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import selfspec
from helpers import tiny
from helpers.captures import Operations
from helpers.reference import Bench
from helpers.snapshot import Snapshot
from selfspec.adapters import ADAPTERS
from selfspec.cache.shared_cache import SharedCache
from selfspec.runtime.few_rows import for_few_rows, for_grouped_queries, for_norms


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The processor is one without AVX-512, or whatever a test says."""

    def is_now(capability: str) -> None:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)

    is_now("AVX2")
    return is_now


SHAPES: list[tuple[int, ...]] = [(rows,) for rows in (*range(1, 11), 16, 49)] + [(2, 3), (1, 4), (2, 1, 2), (4, 4)]


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
@pytest.mark.parametrize("threads", [1, 2])
@torch.no_grad()
def test_products_are_the_same(threads: int, capability: str, processor: Callable[[str], None]) -> None:
    processor(capability)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape, bias in itertools.product(SHAPES, (True, False)):
            linear = nn.Linear(24, 40, bias=bias).double()
            states = torch.randn(*shape, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            found = for_few_rows(linear)(states)
            torch.testing.assert_close(found, linear(states), rtol=0, atol=1e-12)
            assert found.is_contiguous(), shape
            by_columns = states.transpose(0, -1).contiguous().transpose(0, -1)
            torch.testing.assert_close(for_few_rows(linear)(by_columns), found, rtol=0, atol=1e-12)
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def test_what_a_cache_holds_is_multiplied_alike_for_any_number_of_slots() -> None:
    linear = nn.Linear(24, 40)
    view = for_few_rows(linear)
    for slots in (3, 4, 17, 60):
        latents = torch.randn(1, 1, slots, 24)
        assert torch.equal(view(latents), linear(latents))


@torch.no_grad()
def test_hooks_see_the_linears_run() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4)))
    seen: list[str] = []
    for name in ("0", "1.0"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    for_few_rows(model)(torch.randn(2, 8))
    assert seen == ["0", "1.0"]


@pytest.mark.parametrize("viewed", [for_few_rows, for_grouped_queries])
def test_weights_are_shared_and_the_model_stays_as_it_is(
    llama: PreTrainedModel, viewed: Callable[[PreTrainedModel], PreTrainedModel]
) -> None:
    before = Snapshot(llama)
    view = viewed(llama)
    assert view is not llama
    assert type(view) is type(llama)
    assert {id(weight) for weight in view.parameters()} == {id(weight) for weight in llama.parameters()}
    before.assert_same(llama)


class Doubled(nn.Linear):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(states)


def _shadowed(module: nn.Module) -> nn.Module:
    module.forward = partial(torch.mul, 3)
    return module


@pytest.mark.parametrize(
    "module",
    [
        Doubled(8, 8),
        _shadowed(nn.Linear(8, 8)),
        nn.Sequential(_shadowed(nn.Sequential(nn.Linear(8, 8)))),
        nn.Linear(8, 8).bfloat16(),
        nn.Linear(8, 8, device="meta"),
        nn.Sequential(nn.LayerNorm(8), nn.ReLU()),
    ],
    ids=["a subclass", "its own forward", "a parent's own forward", "bfloat16", "elsewhere", "no linear"],
)
def test_what_it_does_not_know_is_left_alone(module: nn.Module) -> None:
    assert for_few_rows(module) is module


@pytest.mark.parametrize("draft", [None, selfspec.drafts.EarlyExit(2)])
def test_verification_computes_blocks_this_way_and_plain_decoding_of_a_row_does_not(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, draft: selfspec.drafts.Drafter | None
) -> None:
    product = mock.Mock(wraps=torch.mm)
    monkeypatch.setattr("selfspec.runtime.few_rows.torch.mm", product)
    monkeypatch.setattr("selfspec.runtime.few_rows.torch.get_num_threads", lambda: 2)
    selfspec.wrap(llama, draft, draft_length=4).generate(tiny.prompt(12), max_new_tokens=9, do_sample=False)
    # Columns of what is multiplied by a weight on the left.
    widths = [call.args[1].shape[1] for call in product.call_args_list]
    assert bool(widths) == (draft is not None)
    # The last committed token and the draft are the most.
    assert draft is None or (min(widths) > 1 and max(widths) == 5)


class DoubledNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = 2 * super().forward(hidden_states)
        return doubled


def with_weights(norm: nn.Module, size: int) -> nn.Module:
    norm.weight = nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(size)))
    return norm


@pytest.mark.kernels
@pytest.mark.parametrize("size", [1, 15, 16, 100, 1003])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (40,)])
@torch.no_grad()
def test_norms_are_those_of_the_modules(size: int, shape: tuple[int, ...]) -> None:
    norm = with_weights(LlamaRMSNorm(size, eps=1e-3), size)
    states = 10 * torch.randn(*shape, size, generator=torch.Generator().manual_seed(0))
    view = for_norms(norm)
    assert view is not norm
    torch.testing.assert_close(view(states), norm(states), rtol=1e-6, atol=1e-6)
    assert torch.equal(view(states.transpose(0, -1).contiguous().transpose(0, -1)), view(states))
    # A token's norm has the same bits beside others.
    assert torch.equal(view(states)[..., -1:, :], view(states[..., -1:, :]))


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_norms_in_16_bits_round_where_the_modules_do(dtype: torch.dtype) -> None:
    norm = with_weights(LlamaRMSNorm(576), 576).to(dtype)
    states = (10 * torch.randn(40, 576, generator=torch.Generator().manual_seed(0))).to(dtype)
    before, view = states.clone(), for_norms(norm)
    assert view is not norm
    # Squares are summed in another order, which decides the last bit of few numbers.
    assert (view(states) != norm(states)).float().mean() < 1e-3
    torch.testing.assert_close(view(states), norm(states))
    assert torch.equal(states, before)
    assert torch.equal(view(states)[-1:], view(states[-1:]))


@pytest.mark.kernels
@torch.no_grad()
def test_other_formulas_and_dtypes_stay_as_they_are() -> None:
    for other in (
        DoubledNorm(8),
        GemmaRMSNorm(8),
        nn.LayerNorm(8),
        LlamaRMSNorm(8).double(),
    ):
        assert for_norms(other) is other
    for norm in (LlamaRMSNorm(8), LlamaRMSNorm(8).bfloat16()):
        states = torch.randn(2, 8, dtype=torch.float64)
        assert torch.equal(for_norms(norm)(states), norm(states))


@pytest.mark.kernels
@torch.no_grad()
def test_hooks_see_norms_run_and_the_model_stays_as_it_is() -> None:
    model = tiny.llama().float()
    before = Snapshot(model)
    seen: list[str] = []
    handle = model.model.norm.register_forward_hook(lambda *_: seen.append("norm"))
    for_norms(model)(tiny.prompt(3))
    handle.remove()
    assert seen == ["norm"]
    before.assert_same(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_grouped_queries_give_the_same_bits(architecture: str, dtype: torch.dtype) -> None:
    model = tiny.BUILDERS[architecture](dtype=dtype)
    for width, masked in itertools.product((1, 2, 5), (False, True)):
        ids, given = tiny.prompt(width, batch=2), None
        if masked:
            given = torch.ones(width, width, dtype=torch.bool).tril().expand(2, 1, -1, -1)
            if getattr(model.config, "layer_types", None):
                given = dict.fromkeys(model.config.layer_types, given)  # type: ignore[assignment]
        expected = model(ids, attention_mask=given, use_cache=False).logits
        assert torch.equal(for_grouped_queries(model)(ids, attention_mask=given, use_cache=False).logits, expected)


def test_without_groups_or_on_another_kernel_it_is_the_model_itself(llama: PreTrainedModel) -> None:
    for model in (tiny.gpt2(), tiny.llama(attention="eager"), tiny.llama(num_key_value_heads=4)):
        assert for_grouped_queries(model) is model
    # There are no native kernels.
    assert for_norms(llama) is llama


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
    copied: list[int] = []

    def note(func: object, output: torch.Tensor) -> None:
        if func is torch.ops.aten.clone.default:
            copied.append(output.numel())

    whole = (past + width) * model.config.hidden_size
    with Operations(note):
        every = torch.ones(1, 1, past + width, past + width, dtype=torch.bool)
        model(tiny.prompt(past + width), attention_mask=every.tril())
    assert max(copied) >= whole
    copied.clear()
    with Operations(note):
        bench.logits(bench.full)
    assert max(copied, default=0) < whole
