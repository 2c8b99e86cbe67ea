"""What is measured of exits: agreement, alpha and cycles."""

from __future__ import annotations

import pytest
import torch

from selfspec.measure.acceptance import ExitFigures
from selfspec.measure.own_text import cycle_share


def test_alpha_is_one_minus_the_total_variation() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]), torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]])
    figures = ExitFigures()
    figures.add(p.log()[:1], q.log()[:1])
    figures.add(p.log()[1:], q.log()[1:])
    assert figures.alpha() == pytest.approx((0.7 + 1.0) / 2)
    assert figures.agreement == 0.5


def test_temperatures_sharpen_both() -> None:
    p, q = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    figures = ExitFigures()
    figures.add(p, q, (0.1, 1.0))
    assert figures.alpha(0.1) < 1e-6 < figures.alpha(1.0)


def test_a_token_without_a_row_counts_as_never_drafted() -> None:
    figures = ExitFigures()
    figures.add(torch.zeros(1, 4), torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]]))
    assert figures.alpha() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        ([], 0.0),
        (list(range(30)), 0.0),
        ([7] * 20, 1.0),
        ([1, 2, 3, 4] * 5, 1.0),
        ([*range(10, 30), *[1, 2, 3, 4, 5] * 4], 0.5),
        # Twice is no cycle.
        ([*range(10)] * 2, 0.0),
        # Nor is a short run, such as indentation.
        ([0, 0, 0, 0, 0, 1, 2, 3, 4, 5], 0.0),
    ],
)
def test_cycles(tokens: list[int], share: float) -> None:
    assert cycle_share(tokens) == share
