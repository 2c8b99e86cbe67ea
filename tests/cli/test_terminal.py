"""How far work has come, where there is no terminal: a line now and then, however long a step takes."""

from __future__ import annotations

import time

import pytest

from selfspec.cli import terminal
from selfspec.cli.terminal import StepBar, counting_bar, progress_bar


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_EVERY", 0.05)


def test_a_step_that_takes_long_is_said_again_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("measuring") as progress:
        bar = StepBar(progress)
        bar.begin(4)
        bar.step("cell 1 of 2")
        bar.step("cell 2 of 2: [all]")
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 7
    assert lines[-1].startswith("measuring: 1 of 4, cell 2 of 2: [all]; ")
    assert "left" in lines[-1]


def test_a_count_is_said_and_nothing_after_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with counting_bar("rounding") as count:
        count(3, 12)
        time.sleep(0.12)
    said = capsys.readouterr().err
    assert "rounding: 3 of 12" in said
    time.sleep(0.12)
    assert capsys.readouterr().err == ""


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("measuring") as progress:
        StepBar(progress).begin(1)
    assert capsys.readouterr().err == ""
