"""Weights in fewer bits: near the weights themselves, the same by pieces, whatever the values are."""

from __future__ import annotations

import pytest
import torch

from helpers.rounding import restored
from selfspec.kernels import rounded
from selfspec.kernels.rounded import Precision, round_weight

EIGHT, FOUR = Precision(8, 32), Precision(4, 32)


@pytest.mark.parametrize(("precision", "most"), [(EIGHT, 0.01), (FOUR, 0.1), (Precision(4, 64), 0.12)])
def test_it_is_near_the_weight(precision: Precision, most: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 256)
    error = (restored(round_weight(weight, precision)) - weight).norm() / weight.norm()
    assert 0 < error < most


def test_fitted_scales_leave_less_error(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    fitted = (restored(round_weight(weight, FOUR)) - weight).square().sum()
    monkeypatch.setattr(rounded, "_FITS", 0)
    plain = (restored(round_weight(weight, FOUR)) - weight).square().sum()
    assert fitted < 0.9 * plain


def test_groups_of_one_value_keep_it() -> None:
    weight = torch.tensor([[-3.0] * 32 + [0.5] * 32])
    torch.testing.assert_close(restored(round_weight(weight, FOUR)), weight)


@pytest.mark.parametrize("precision", [EIGHT, FOUR])
def test_pieces_and_experts_are_rounded_as_the_whole(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 40, 64)
    whole = round_weight(weight, precision)
    monkeypatch.setattr(rounded, "_AT_ONCE", 7 * 64)
    for expert in range(3):
        alone = round_weight(weight[expert], precision)
        assert all(torch.equal(values, whole[expert].parts[name]) for name, values in alone.parts.items())


@pytest.mark.parametrize("precision", [EIGHT, FOUR])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_of_zeros_are_zeros(precision: Precision, dtype: torch.dtype) -> None:
    assert not restored(round_weight(torch.zeros(4, 64, dtype=dtype), precision)).any()


@pytest.mark.parametrize(("precision", "share"), [(EIGHT, 0.25), (FOUR, 0.25)])
def test_columns_of_unlike_size_cost_little_where_inputs_make_up_for_them(precision: Precision, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(256, generator=generator).mul(2).exp()
    weight = torch.randn(96, 256, generator=generator) * sizes
    states = torch.randn(64, 256, generator=generator) / sizes
    exact = states @ weight.t()
    evened, plain = (
        states @ restored(round_weight(weight, precision, factors)).t() for factors in (None, torch.ones(256))
    )
    assert (evened - exact).norm() < share * (plain - exact).norm()


@pytest.mark.parametrize("precision", [EIGHT, FOUR])
def test_inputs_that_nothing_reads_change_nothing(precision: Precision) -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    weight[:, 7] = 0
    found = round_weight(weight, precision)
    assert found.factors[7] == 0
    assert not restored(found)[:, 7].any()
    assert restored(found).isfinite().all()


def test_the_columns_of_a_head_stay_as_they_are() -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    assert (rounded.round_head(weight, EIGHT).factors == 1).all()
    assert (round_weight(weight, EIGHT).factors != 1).any()


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(RuntimeError, match="groups of 64"):
        round_weight(torch.zeros(4, 96), Precision(4, 64))
