"""Trials of planted bugs, in a project of a few lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_CODE = """\
def one():
    return 1

def two():
    return 2
"""
_TESTS = """\
import os, pathlib, time
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
    pathlib.Path(os.environ["STARTED"]).write_text(str(os.getpid()))
    time.sleep(two() - 2)
"""
# As the command does it, but for the libraries, which this project has no need of.
_RUN = """\
import asyncio, json, sys
from pathlib import Path
from mutations.catalogue import Mutation
from mutations.runner import try_all

def tell(mutation, outcome):
    print(json.dumps([mutation.name, outcome.verdict, outcome.said, outcome.seconds]), flush=True)

entries = [Mutation(*entry) for entry in json.loads(sys.argv[1])]
asyncio.run(try_all(entries, Path("project"), Path("results"), 2, float(sys.argv[2]), tell))
"""


def _start(folder: Path, limit: float, *entries: tuple[str, str, str, str, list[str]]) -> subprocess.Popen[str]:
    """Start a run, one outcome a line: name, verdict, what was said, seconds."""
    for file, text in {"selfspec/__init__.py": _CODE, "tests/test_it.py": _TESTS, "pyproject.toml": ""}.items():
        (folder / "project" / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / "project" / file).write_text(text, encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        "STARTED": str(folder / "started"),
    }
    command = [sys.executable, "-c", _RUN, json.dumps(entries), str(limit)]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def _finish(run: subprocess.Popen[str]) -> dict[str, list[object]]:
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0
    return {name: outcome for name, *outcome in map(json.loads, output.splitlines())}


def test_verdicts_and_what_was_caught_is_not_tried_again(tmp_path: Path) -> None:
    entries = [
        ("caught", "one", "1", "2", ["test_one"]),
        ("survives", "one", "1", "0", ["test_both"]),
        ("skipped", "one", "1", "2", ["test_skipped"]),
        ("unsound", "one", "1", "2", ["test_wrong"]),
        ("broken", "one", "return 1", "return missing", ["test_one", "--no-such-option"]),
    ]
    first = _finish(_start(tmp_path, 60, *entries))
    verdicts = {name: outcome[0] for name, outcome in first.items()}
    assert verdicts == {
        "caught": "caught",
        "survives": "survived",
        "skipped": "no verdict",
        "unsound": "no verdict",
        "broken": "no verdict",
    }
    assert first["caught"][1] == "tests/test_it.py::test_one"
    assert "1 passed" in (tmp_path / "results" / "survives.log").read_text(encoding="utf-8")
    again = _finish(_start(tmp_path, 60, *entries[:2]))
    assert again["caught"] == first["caught"]  # Seconds and all.
    assert again["survives"] != first["survives"]


_ENDLESS = ("endless", "two", "2", "1000", ["test_waits"])


def test_a_bug_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    assert _finish(_start(tmp_path, 2, _ENDLESS))["endless"][0] == "too long"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_what_is_running(tmp_path: Path, number: signal.Signals) -> None:
    run = _start(tmp_path, 600, _ENDLESS)
    started = tmp_path / "started"
    until = time.monotonic() + 60
    while not started.exists() or not started.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    run.send_signal(number)
    assert run.wait(timeout=30) != 0
    run.communicate()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
