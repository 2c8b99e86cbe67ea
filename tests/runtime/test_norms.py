"""Norms in one step: what the modules compute, and only modules that compute it to the letter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from helpers import tiny
from helpers.snapshot import Snapshot
from selfspec.runtime.norms import for_norms


class Doubled(LlamaRMSNorm):
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
def test_norms_are_the_modules(size: int, shape: tuple[int, ...]) -> None:
    norm = with_weights(LlamaRMSNorm(size, eps=1e-3), size)
    states = 10 * torch.randn(*shape, size, generator=torch.Generator().manual_seed(0))
    view = for_norms(norm)
    assert view is not norm
    torch.testing.assert_close(view(states), norm(states), rtol=1e-6, atol=1e-6)
    assert torch.equal(view(states.transpose(0, -1).contiguous().transpose(0, -1)), view(states))
    # A token's norm has the same bits beside others.
    assert torch.equal(view(states)[..., -1:, :], view(states[..., -1:, :]))


@pytest.mark.kernels
@torch.no_grad()
def test_other_formulas_and_dtypes_stay_as_they_are() -> None:
    for other in (Doubled(8), GemmaRMSNorm(8), nn.LayerNorm(8), LlamaRMSNorm(8).bfloat16(), LlamaRMSNorm(8).double()):
        assert for_norms(other) is other
    norm = LlamaRMSNorm(8)
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


def test_without_the_kernels_nothing_is_replaced() -> None:
    model = tiny.llama()
    assert for_norms(model) is model
