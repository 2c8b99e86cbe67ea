"""Linears of few rows: the same numbers, hooks and weights, and nothing of the model changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.snapshot import Snapshot
from selfspec.runtime.few_rows import for_few_rows


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
def test_states_laid_out_by_columns_give_the_same() -> None:
    linear = nn.Linear(24, 40)
    states = torch.randn(24, 3).t()
    torch.testing.assert_close(for_few_rows(linear)(states), linear(states))


@torch.no_grad()
def test_hooks_see_the_linears_run() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4)))
    seen: list[str] = []
    for name in ("0", "1.0"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    for_few_rows(model)(torch.randn(2, 8))
    assert seen == ["0", "1.0"]


def test_weights_are_shared_and_the_model_stays_as_it_is() -> None:
    model = tiny.llama()
    before = Snapshot(model)
    view = for_few_rows(model)
    assert view is not model
    assert type(view) is type(model)
    assert {id(weight) for weight in view.parameters()} == {id(weight) for weight in model.parameters()}
    before.assert_same(model)


class Doubled(nn.Linear):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(states)


def _shadowed() -> nn.Module:
    linear = nn.Linear(8, 8)
    linear.forward = partial(torch.mul, 3)  # type: ignore[method-assign]
    return linear


def _holding_a_shadowed_parent() -> nn.Module:
    parent = nn.Sequential(nn.Linear(8, 8))
    parent.forward = partial(torch.mul, 3)  # type: ignore[method-assign]
    return nn.Sequential(parent)


@pytest.mark.parametrize(
    "module",
    [
        Doubled(8, 8),
        _shadowed(),
        _holding_a_shadowed_parent(),
        nn.Linear(8, 8).bfloat16(),
        nn.Linear(8, 8, device="meta"),
        nn.Sequential(nn.LayerNorm(8), nn.ReLU()),
    ],
    ids=["a subclass", "its own forward", "a parent's own forward", "bfloat16", "elsewhere", "no linear"],
)
def test_what_it_does_not_know_is_left_alone(module: nn.Module) -> None:
    assert for_few_rows(module) is module


@pytest.mark.parametrize(
    ("capability", "threads", "width", "rows"),
    [
        ("AVX2", 1, 24, range(2, 5)),
        ("AVX2", 2, 24, range(2, 9)),
        ("AVX2", 2, 512, range(2, 9)),
        ("AVX512", 1, 24, range(0)),
        ("AVX512", 2, 24, range(16, 49)),
        ("AVX512", 1, 512, range(8, 49)),
        ("AVX512", 2, 512, range(8, 49)),
    ],
)
@torch.no_grad()
def test_the_weight_is_on_the_left_where_that_was_the_faster_way(
    monkeypatch: pytest.MonkeyPatch,
    processor: Callable[[str], None],
    capability: str,
    threads: int,
    width: int,
    rows: range,
) -> None:
    processor(capability)
    monkeypatch.setattr("selfspec.runtime.few_rows.torch.get_num_threads", lambda: threads)
    widths = _spied(monkeypatch)
    view = for_few_rows(nn.Linear(width, 8))
    for count in range(1, 65):
        view(torch.zeros(count, width))
    # Four columns take less time than three.
    assert widths == [4 if count == 3 else count for count in rows]


def test_verification_computes_blocks_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = _left_factors(monkeypatch, tiny.llama(), draft=selfspec.drafts.EarlyExit(2))
    assert max(widths) == 5  # the last committed token and the draft
    assert min(widths) > 1


def test_plain_decoding_of_one_row_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _left_factors(monkeypatch, tiny.llama(), draft=None)


def _left_factors(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, draft: selfspec.drafts.Drafter | None
) -> list[int]:
    widths = _spied(monkeypatch)
    monkeypatch.setattr("selfspec.runtime.few_rows.torch.get_num_threads", lambda: 2)
    spec = selfspec.wrap(model, draft, draft_length=4)
    spec.generate(tiny.prompt(12), max_new_tokens=9, do_sample=False)
    return widths


def _spied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the number of columns of every product with the weight on the left."""
    widths: list[int] = []
    product = torch.mm

    def spy(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        widths.append(right.shape[1])
        return product(left, right)

    monkeypatch.setattr("selfspec.runtime.few_rows.torch.mm", spy)
    return widths
