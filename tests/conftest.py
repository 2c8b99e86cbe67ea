"""Fixtures of the whole suite. Its being here also puts this folder on the path, for `from tiny import ...`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import tiny

# The models are too small to share among threads, which on busy cores wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=sorted(tiny.BUILDERS))
def architecture(request: pytest.FixtureRequest) -> str:
    """Each architecture selfspec knows."""
    name: str = request.param
    return name


@pytest.fixture
def llama() -> PreTrainedModel:
    """A fresh tiny llama."""
    return tiny.llama()


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """The folder of trained checkpoints; skips where there is none."""
    default = Path(__file__).resolve().parent.parent.parent / "shared" / "models"
    folder = Path(os.environ.get("SELFSPEC_CHECKPOINTS", default))
    if not folder.is_dir():
        pytest.skip(f"no folder of checkpoints: set SELFSPEC_CHECKPOINTS (looked for {folder.name})")
    return folder
