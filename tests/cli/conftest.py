"""The tests' own checkpoint as the model of commands."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers.saved_folders import checkpoint_folder
from selfspec.cli import terminal


@pytest.fixture
def folder() -> str:
    return str(checkpoint_folder())


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(checkpoint_folder(), copy)
    return copy


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """How far work has come is said every ten seconds, which on a busy machine is in any test."""
    monkeypatch.setattr(terminal, "_EVERY", 3600.0)
