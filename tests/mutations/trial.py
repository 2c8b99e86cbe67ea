"""One planted bug and the tests that must notice it, in a copy of the project and a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutations.anchor import Sources
from mutations.catalogue import Mutation
from mutations.selection import Suite

ROOT = Path(__file__).resolve().parents[2]
_CODE = ("selfspec", "adapters", "tests", "docs", "examples", "README.md", "pyproject.toml")
_FAILED = 1  # pytest's status for tests that ran and failed; others are for tests that did not run


@dataclass(frozen=True)
class Outcome:
    """What became of one planted bug.

    Attributes:
        mutation: the bug.
        caught: whether a test failed.
        said: the last line of pytest.
        seconds: how long it took.
    """

    mutation: Mutation
    caught: bool
    said: str
    seconds: float


class TrialError(Exception):
    """The tests fail without any bug, or did not run at all, so nothing can be said."""


def require_sound(folder: Path, mutations: Sequence[Mutation]) -> None:
    """Run all tests that will be asked, on the code as it is.

    Raises:
        TrialError: they do not pass.
    """
    copy = _copied(folder)
    suite = Suite(copy)
    for tests in dict.fromkeys(tuple(suite.arguments(mutation)) for mutation in mutations):
        status, said = _pytest(copy, tests)
        if status != 0:
            raise TrialError(f"pytest {' '.join(tests)} fails without any bug planted: {said}")


def try_mutation(folder: Path, mutation: Mutation) -> Outcome:
    """Plant one bug and run its tests.

    Raises:
        AnchorError: the bug cannot be planted.
        SelectionError: its tests are not there.
        TrialError: its tests did not run.
    """
    started = time.perf_counter()
    copy = _copied(folder)
    planted = Sources(copy).planted(mutation)
    (copy / planted.file).write_text(planted.text, encoding="utf-8")
    status, said = _pytest(copy, Suite(copy).arguments(mutation))
    shutil.rmtree(copy)
    if status not in (0, _FAILED):
        raise TrialError(f"{mutation.name}: pytest ended with status {status}: {said}")
    return Outcome(mutation, status == _FAILED, said, time.perf_counter() - started)


def _copied(folder: Path) -> Path:
    copy = Path(tempfile.mkdtemp(dir=folder))
    for name in _CODE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


def _pytest(copy: Path, tests: Sequence[str]) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "CI": "true"}
    options = ["-x", "-q", "-n0", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return done.returncode, lines[-1] if lines else done.stderr.strip()[-200:]
