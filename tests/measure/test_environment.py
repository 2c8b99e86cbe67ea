"""What a measurement says it was made with, and which cores were free for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from selfspec.measure import spare_cores
from selfspec.measure.environment import commit, environment
from selfspec.measure.spare_cores import CoreWatch, SpareCores


def statistics(busy: list[int], idle: list[int]) -> str:
    """A file of the system's, with one line for each core and one for all."""
    lines = [f"cpu{core} {of[0]} 0 0 {of[1]} 0 0 0 0 0 0" for core, of in enumerate(zip(busy, idle, strict=True))]
    return "\n".join([f"cpu {sum(busy)} 0 0 {sum(idle)} 0 0 0 0 0 0", *lines, "intr 5", ""])


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(spare_cores, "_STATISTICS", tmp_path / "stat")
    monkeypatch.setattr(spare_cores, "_usable_cores", lambda: frozenset({0, 1}))
    return tmp_path / "stat"


@pytest.mark.parametrize(
    ("busy", "own", "free"),
    [([0, 0], 0.0, 2.0), ([100, 0], 0.0, 1.0), ([100, 0], 1.0, 2.0), ([100, 100], 0.5, 0.5), ([100, 100], 0.0, 0.0)],
)
def test_what_others_take_is_not_free(
    file: Path, monkeypatch: pytest.MonkeyPatch, busy: list[int], own: float, free: float
) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr("time.process_time", iter([3.0, 3.0 + own]).__next__)
    file.write_text(statistics([50, 50], [900, 900]))
    watch = CoreWatch()
    took = [each * ticks // 100 for each in busy]
    file.write_text(statistics([50 + each for each in took], [900 + ticks - each for each in took]))
    found = watch.read()
    assert found.cores == 2
    assert found.free == pytest.approx(free)


def test_where_the_system_does_not_tell_nothing_is_known(file: Path) -> None:
    assert CoreWatch().read() == SpareCores(2, None)
    file.write_text(statistics([50, 50], [900, 900]))
    watch = CoreWatch()
    assert watch.read() == SpareCores(2, None)


@pytest.mark.parametrize(
    ("free", "threads"), [(None, 4), (0.0, 1), (1.0, 1), (1.6, 1), (1.7, 2), (2.0, 2), (7.9, 4)], ids=str
)
def test_there_is_a_thread_for_each_free_core(free: float | None, threads: int) -> None:
    assert SpareCores(8, free).threads(most=4) == threads


def test_the_commit_is_named_where_there_is_one() -> None:
    if not (Path(__file__).resolve().parents[2] / ".git").exists():
        assert commit() is None
        pytest.skip("no git checkout")
    named = commit()
    assert named is not None
    assert len(named.rstrip("+")) == 12


def test_a_measurement_says_whether_kernels_ran() -> None:
    assert environment(torch.device("cpu"))["cpu_kernels"] is False
