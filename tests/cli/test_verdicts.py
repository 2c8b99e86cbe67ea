"""Verdicts: what loses is not called the best, and what is predicted is not called measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfspec.cli.ablate import _verdict
from selfspec.cli.train_check import CheckedExit, verdict
from selfspec.measure.estimate import Estimate


def estimate(value: float) -> Estimate:
    return Estimate(value, value - 0.1, value + 0.1)


@pytest.mark.parametrize(
    ("greedy", "sampled", "said"),
    [(1.4, 1.2, "exit:4 in times plain decoding: greedy 1.40"), (0.9, 0.8, "No exit beat plain decoding here")],
)
def test_of_a_training(greedy: float, sampled: float, said: str) -> None:
    checked = [
        CheckedExit("exit:2", 1.3, estimate(0.5), estimate(0.5)),
        CheckedExit("exit:4", 1.5, estimate(greedy), estimate(sampled)),
    ]
    found = verdict(checked, Path("FASTER"))
    assert found.startswith(said)
    assert "predicted 1.50" in found


ROW = {"draft": "exit:2", "predicted_speedup": 1.3}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([ROW | {"measured_speedup_median": 1.2}], "exit:2, measured 1.20 and predicted 1.30 times"),
        ([ROW | {"measured_speedup_median": 0.9}], "no draft beat plain decoding here; exit:2 came to 0.90"),
        ([ROW | {"measured_speedup_median": float("nan")}], "exit:2 is predicted 1.30 times plain"),
        ([ROW | {"predicted_speedup": 0.9}], "no draft is predicted to beat plain decoding"),
        ([], "no draft to judge"),
    ],
)
def test_of_a_study(rows: list[dict[str, object]], said: str) -> None:
    assert said in _verdict("texts", rows)
