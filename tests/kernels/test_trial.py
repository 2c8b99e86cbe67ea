"""A kernel is trusted where it gives what torch gives; where it does not, torch's path runs and a warning says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from selfspec.kernels.trial import Trial, runs_triton
from selfspec.runtime.model_state import run_watched

RIGHT = torch.tensor([1.0, -4.0])


class Calls:
    """Paths that count how often they run."""

    def __init__(self, kernel: Tensor, stock: Tensor = RIGHT) -> None:
        self.given = {"kernel": kernel, "stock": stock}
        self.counts = dict.fromkeys(self.given, 0)

    def run(self, trial: Trial, kind: str = "any") -> Tensor:
        return trial.run(kind, lambda: self._path("kernel"), lambda: self._path("stock"), most=1e-3)

    def _path(self, name: str) -> Tensor:
        self.counts[name] += 1
        if not len(self.given[name]):
            raise RuntimeError("no such instruction")
        return self.given[name]


def test_a_kernel_that_gives_what_torch_gives_runs_alone_after_its_trial(caplog: pytest.LogCaptureFixture) -> None:
    rounded, trial = Calls(RIGHT + 1e-4), Trial("something")
    for _ in range(3):
        assert rounded.run(trial) is rounded.given["kernel"]
    assert rounded.counts == {"kernel": 4, "stock": 1}
    rounded.run(trial, "another kind")
    assert rounded.counts == {"kernel": 6, "stock": 2}
    assert not caplog.records


@pytest.mark.parametrize("wrong", [RIGHT + 0.1, RIGHT * torch.nan, torch.zeros(0)], ids=["off", "nan", "raises"])
def test_a_kernel_that_does_not_is_not_run_again(wrong: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    calls, trial = Calls(wrong), Trial("something")
    for _ in range(3):
        assert calls.run(trial) is RIGHT
    assert calls.counts == {"kernel": 1, "stock": 3}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "something in Triton" in caplog.text


def test_numbers_that_are_not_finite_decide_nothing(caplog: pytest.LogCaptureFixture) -> None:
    trial, broken = Trial("something"), Calls(RIGHT * torch.nan, RIGHT * torch.nan)
    assert broken.run(trial) is broken.given["stock"]
    calls = Calls(RIGHT.clone())
    assert calls.run(trial) is calls.given["kernel"]
    assert not caplog.records


def test_a_pass_that_may_read_no_values_may_try_a_kernel() -> None:
    calls = Calls(RIGHT.clone())
    assert run_watched(lambda: calls.run(Trial("something"))) is calls.given["kernel"]


def test_a_cpu_runs_none() -> None:
    assert not runs_triton(torch.device("cpu"))
