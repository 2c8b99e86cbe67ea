"""Trials of planted bugs, in a project of a few lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_CODE = """\
def one():
    return 1

def two():
    return 2
"""
_TESTS = """\
import time
import pytest
from selfspec import one, two

def test_one():
    assert one() == 1

def test_both():
    assert one() < two()

@pytest.mark.skipif(True, reason="never")
def test_skipped():
    raise AssertionError

def test_wrong():
    raise AssertionError

def test_waits():
    time.sleep(two() - 2)
"""
# As the command does it, but for the libraries, which this project has no need of.
_RUN = """\
import json, sys
from pathlib import Path
from mutations.catalogue import Mutation
from mutations.run import try_all

def tell(mutation, outcome):
    print(json.dumps([mutation.name, outcome.verdict, outcome.said]), flush=True)

if __name__ == "__main__":
    entries = [Mutation(*entry) for entry in json.loads(sys.argv[1])]
    try_all(entries, Path("project"), 2, float(sys.argv[2]), tell, libraries=[])
"""


def _tried(folder: Path, limit: float, *entries: tuple[str, str, str, str, list[str]]) -> dict[str, list[str]]:
    """Try bugs; verdict and what was said of each, by name."""
    files = {"selfspec/__init__.py": _CODE, "tests/test_it.py": _TESTS, "pyproject.toml": ""}
    for file, text in files.items():
        (folder / "project" / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / "project" / file).write_text(text, encoding="utf-8")
    (folder / "run.py").write_text(_RUN, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    ended = subprocess.run(
        [sys.executable, "run.py", json.dumps(entries), str(limit)],
        cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=True,
    )  # fmt: skip
    return {name: outcome for name, *outcome in map(json.loads, ended.stdout.splitlines())}


@pytest.mark.tools
def test_verdicts(tmp_path: Path) -> None:
    found = _tried(
        tmp_path,
        60,
        ("caught", "one", "1", "2", ["test_one"]),
        ("survives", "one", "1", "0", ["test_both"]),
        ("skipped", "one", "1", "2", ["test_skipped"]),
        ("unsound", "one", "1", "2", ["test_wrong"]),
        ("broken", "one", "return 1", "return missing", ["test_one", "--no-such-option"]),
    )
    assert {name: verdict for name, (verdict, _) in found.items()} == {
        "caught": "caught",
        "survives": "survived",
        "skipped": "no verdict",
        "unsound": "no verdict",
        "broken": "no verdict",
    }
    assert found["caught"][1] == "tests/test_it.py::test_one"
    assert "1 passed" in found["survives"][1]


@pytest.mark.tools
def test_a_bug_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    assert _tried(tmp_path, 3, ("endless", "two", "2", "1000", ["test_waits"]))["endless"][0] == "too long"
