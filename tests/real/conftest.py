"""The real checkpoints, where there are any: see checkpoints.py beside this."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from helpers.engines import Real

VARIABLE = "SELFSPEC_REAL_CHECKPOINTS"


@pytest.fixture(scope="session")
def checkpoint() -> Callable[[str], Path]:
    def found(name: str) -> Path:
        named = os.environ.get(VARIABLE)
        if named is None:
            pytest.skip(f"no real checkpoints: set {VARIABLE} to a folder that tests/real/checkpoints.py made")
        folder = Path(named) / name
        if not folder.is_dir():
            pytest.skip(f"{VARIABLE} has no {name}: see tests/real/checkpoints.py")
        return folder

    return found


@pytest.fixture(scope="session")
def real(checkpoint: Callable[[str], Path]) -> Callable[[str], Real]:
    return cache(lambda name: Real(checkpoint(name)))
