"""Rotary positions in one step: what the kernel does not read as it lies is left to torch."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from helpers import tiny
from selfspec.runtime import rotary

Q, K, TURN = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 3, 8)
OTHERWISE = {
    "sines laid out in another way": (Q, K, TURN, TURN.transpose(1, 2).contiguous().transpose(1, 2)),
    "sines of one row": (Q, K, TURN, TURN[:1]),
    "one token for all": (Q, K, TURN[:, :1], TURN[:, :1]),
    "part of a head": (Q, K, TURN[..., :4], TURN[..., :4]),
    "keys of other tokens": (Q, K[:, :, :2], TURN, TURN),
    "an odd width": (Q[..., :7], K[..., :7], TURN[..., :7], TURN[..., :7]),
    "another dtype": (Q, K, TURN.double(), TURN.double()),
    "gradients": (Q.clone().requires_grad_(), K, TURN, TURN),
}


@pytest.mark.parametrize("given", OTHERWISE.values(), ids=OTHERWISE)
def test_other_layouts_are_left_to_torch(given: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "runs_triton", lambda _: True)
    stock = mock.Mock(return_value="torch's")
    q, k, cosines, sines = given
    assert rotary._rotated(stock, q, k, cosines, sines) == "torch's"
    stock.assert_called_once()


def test_on_a_cpu_nothing_is_replaced() -> None:
    model = tiny.llama()
    assert rotary.for_rotary(model) is model
