"""What a measurement says it was made with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from selfspec.measure.environment import commit, environment


def test_the_commit_is_named_where_there_is_one() -> None:
    if not (Path(__file__).resolve().parents[2] / ".git").exists():
        assert commit() is None
        pytest.skip("no git checkout")
    named = commit()
    assert named is not None
    assert len(named.rstrip("+")) == 12


def test_a_measurement_says_whether_kernels_ran() -> None:
    assert environment(torch.device("cpu"))["cpu_kernels"] is False
