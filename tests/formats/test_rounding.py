"""Weights in fewer bits: near the weights themselves, the same by pieces, whatever the values are."""

from __future__ import annotations

import pytest
import torch

from helpers.reference import restored
from selfspec.formats import int4, rounding
from selfspec.formats.int4 import Int4
from selfspec.formats.int8 import Int8
from selfspec.formats.rounding import Rounded

EIGHT, FOUR = Int8(), Int4()


@pytest.mark.parametrize(("format", "most"), [(EIGHT, 0.01), (FOUR, 0.1), (Int4(64), 0.12)])
def test_it_is_near_the_weight(format: Rounded, most: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 256)
    error = (restored(format.pack(weight)) - weight).norm() / weight.norm()
    assert 0 < error < most


def test_fitted_scales_leave_less_error(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    fitted = (restored(FOUR.pack(weight)) - weight).square().sum()
    monkeypatch.setattr(int4, "_FITS", 0)
    plain = (restored(FOUR.pack(weight)) - weight).square().sum()
    assert fitted < 0.9 * plain


def test_groups_of_one_value_keep_it() -> None:
    weight = torch.tensor([[-3.0] * 32 + [0.5] * 32])
    torch.testing.assert_close(restored(FOUR.pack(weight)), weight)


@pytest.mark.parametrize("format", [EIGHT, FOUR])
def test_pieces_and_experts_are_rounded_as_the_whole(format: Rounded, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 40, 64)
    whole = format.pack(weight)
    monkeypatch.setattr(rounding, "_AT_ONCE", 7 * 64)
    for expert in range(3):
        alone = format.pack(weight[expert])
        assert all(torch.equal(values, whole.of_expert(expert)[name]) for name, values in alone.parts.items())


@pytest.mark.parametrize("format", [EIGHT, FOUR])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_of_zeros_are_zeros(format: Rounded, dtype: torch.dtype) -> None:
    assert not restored(format.pack(torch.zeros(4, 64, dtype=dtype))).any()


@pytest.mark.parametrize(("format", "share"), [(EIGHT, 0.25), (FOUR, 0.25)])
def test_columns_of_unlike_size_cost_little_where_inputs_make_up_for_them(format: Rounded, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(256, generator=generator).mul(2).exp()
    weight = torch.randn(96, 256, generator=generator) * sizes
    states = torch.randn(64, 256, generator=generator) / sizes
    exact = states @ weight.t()
    evened, plain = (states @ restored(format.pack(weight, factors)).t() for factors in (None, torch.ones(256)))
    assert (evened - exact).norm() < share * (plain - exact).norm()


@pytest.mark.parametrize("format", [EIGHT, FOUR])
def test_inputs_that_nothing_reads_change_nothing(format: Rounded) -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    weight[:, 7] = 0
    found = format.pack(weight)
    assert found["factors"][7] == 0
    assert not restored(found)[:, 7].any()
    assert restored(found).isfinite().all()


def test_the_columns_of_a_head_stay_as_they_are() -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    assert (EIGHT.pack_head(weight)["factors"] == 1).all()
    assert (EIGHT.pack(weight)["factors"] != 1).any()


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(RuntimeError, match="groups of 64"):
        Int4(64).pack(torch.zeros(4, 96))
