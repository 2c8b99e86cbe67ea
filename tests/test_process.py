"""The memory that a process may take: the machine's, its control groups' of both versions, and its own limits."""

from __future__ import annotations

import ctypes
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from selfspec import process

FAR = 2**63 - 4096  # what version 1 says where there is no limit
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(process, "_GROUPS", tmp_path)
    monkeypatch.setattr(process, "_GROUPS_OF_PROCESS", tmp_path / "self")
    monkeypatch.setattr(process, "_system", lambda _: [10_000])
    return tmp_path


@pytest.mark.parametrize(
    ("said", "levels", "names", "limit", "free"),
    [
        ("0::/user/job\n", {"": ("max", 900), "user": (800, 300), "user/job": (900, 200)}, V2, 800, 500),
        ("0::/user/job\n", {"user": ("max", 300), "user/job": ("max", 200)}, V2, 10_000, 10_000),
        ("4:memory:/user/job\n1:cpu:/\n", {"memory": (FAR, 1), "memory/user/job": (700, 600)}, V1, 700, 100),
        ("4:cpu,memory:/a\n", {"cpu,memory": (FAR, 1), "cpu,memory/a": (600, 100)}, V1, 600, 500),
        # In a container the root of its own group is what is mounted.
        ("4:memory:/docker/0123\n0::/\n", {"memory": (600, 200)}, V1, 600, 400),
        ("0::/../other\n", {"": (500, 100)}, V2, 500, 400),
        ("", {}, V2, 10_000, 10_000),
    ],
)
def test_the_nearest_limit_of_all_groups_around_counts(
    groups: Path,
    said: str,
    levels: dict[str, tuple[int | str, int]],
    names: tuple[str, str],
    limit: int,
    free: int,
) -> None:
    (groups / "self").write_text(said)
    for level, values in levels.items():
        (groups / level).mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, values, strict=True):
            (groups / level / name).write_text(f"{value}\n")
    assert (process.machine_bytes(), process.free_bytes()) == (limit, free)


def test_a_limit_of_the_address_space_counts(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (400 if kind == resource.RLIMIT_AS else -1, -1))
    assert process.machine_bytes() == 400


def test_systems_without_proc_are_asked_by_ps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if shutil.which("ps") is None:
        pytest.skip("no ps here")
    told = process.resident_bytes()
    monkeypatch.setattr(process, "_STATUS", tmp_path / "none")
    asked = process.resident_bytes()
    assert told is not None
    assert asked is not None
    assert 0.8 * told < asked < 1.2 * told


def test_windows_is_asked_by_its_own_call(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(given: Any) -> int:
        assert given._obj.length == ctypes.sizeof(given._obj) == 64
        given._obj.total, given._obj.free = 5000, 3000
        return 1

    monkeypatch.undo()
    monkeypatch.setattr(process, "_GROUPS_OF_PROCESS", groups / "none")
    monkeypatch.setattr(process, "_own_limits", list)
    monkeypatch.setattr(sys, "platform", "win32")
    kernel = SimpleNamespace(GlobalMemoryStatusEx=fill)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    assert (process.machine_bytes(), process.free_bytes()) == (5000, 3000)
