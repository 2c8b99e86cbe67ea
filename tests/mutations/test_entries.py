"""Entries are found by names and syntax, what is wrong with one is said; bugs are tried in a project of a few lines."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from mutations.anchor import EntryError, Sources, Suite
from mutations.catalogue import CATALOGUE, Mutation
from mutations.run import ROOT

_CODE = '''\
LIMIT = 3


class Cache:
    size: int = 0

    def grow(self, new: int) -> int:
        """Grow to a size, é."""
        self.size = max(  # A comment.
            self.size,
            new,
        )
        if new > LIMIT:
            new -= 1
            new -= 2
        return self.size


def grow(new: int) -> tuple[int, int]:
    return new + 1, new + 1
'''

_MAX = """max(  # A comment.
            self.size,
            new,
        )"""
_LESS = """new -= 1
            new -= 2"""
_IF_LESS = """if new:
                new -= 2"""


def _planted(folder: Path, at: str, right: str, wrong: str) -> str:
    file = folder / "selfspec" / "somewhere" / "cache.py"
    file.parent.mkdir(parents=True)
    file.write_text(_CODE, encoding="utf-8")
    planted = Sources(folder).planted(Mutation("a bug", at, right, wrong, ()))
    assert folder / planted.file == file
    return planted.text


@pytest.mark.parametrize(
    ("at", "right", "wrong", "expected"),
    [
        ("Cache.grow", "max(self.size, new)", "new", (_MAX, "(new)")),
        ("Cache.grow", "max(_1, _2)", "min(_2, _1)", (_MAX, "(min(new, self.size))")),
        ("Cache.grow", "new -= 1\nnew -= 2", "if new:\n    new -= 2", (_LESS, _IF_LESS)),
        ("Cache.grow", "return self.size", "pass", ("return self.size", "pass")),
        ("Cache.size", "0", "1", ("size: int = 0", "size: int = (1)")),
        ("LIMIT", "LIMIT = _1", "LIMIT = _1 + 1", ("LIMIT = 3", "LIMIT = 3 + 1")),
    ],
)
def test_code_is_found_by_its_syntax(
    tmp_path: Path, at: str, right: str, wrong: str, expected: tuple[str, str]
) -> None:
    assert _planted(tmp_path, at, right, wrong) == ast.unparse(ast.parse(_CODE.replace(*expected)))


@pytest.mark.parametrize(
    ("at", "right", "wrong", "message"),
    [
        ("grow", "new + 1", "new", "'a bug': `right` is found 2 times in grow .* Take in more"),
        ("grow", "self.size = _1", "pass", "is not in grow .* this code is in Cache.grow .* Correct `at`"),
        ("Cash.grow", "max(_1, _2)", "_1", "nothing is defined as Cash.grow; this code is in Cache.grow .*"),
        ("Cache.grow", "min(_1, _2)", "_1", "`right` is not in Cache.grow .* nor anywhere else. Write `at`"),
        ("Cache.grow", "max(_1, _2)", "max(_1, _2)", "`wrong` is the same code as `right`"),
        ("Cache.grow", "return self.size", "break", "does not compile"),
        ("Cache.grow", "max(", "_1", "no whole expression"),
    ],
)
def test_what_cannot_be_planted_says_what_to_do(tmp_path: Path, at: str, right: str, wrong: str, message: str) -> None:
    with pytest.raises(EntryError, match=message):
        _planted(tmp_path, at, right, wrong)


def test_tests_are_found_wherever_they_are(tmp_path: Path) -> None:
    for file, names in {"a/test_a.py": ("test_one", "test_two"), "b/c/test_b.py": ("test_two",)}.items():
        path = tmp_path / "tests" / file
        path.parent.mkdir(parents=True)
        path.write_text("".join(f"def {name}() -> None: ...\n" for name in names), encoding="utf-8")

    def arguments(*names: str) -> list[str]:
        return Suite(tmp_path).arguments(Mutation("a bug", "", "", "", names))

    assert arguments("test_one[x-1]", "-k", "y") == ["tests/a/test_a.py::test_one[x-1]", "-k", "y"]
    assert arguments("test_b.py", "test_a.py::test_two") == ["tests/b/c/test_b.py", "tests/a/test_a.py::test_two"]
    with pytest.raises(EntryError, match=r"'a bug': 2 tests .* named test_two .*name the file too"):
        arguments("test_two")
    with pytest.raises(EntryError, match=r"'a bug': 0 tests .* named test_three. Correct"):
        arguments("test_three")


@pytest.mark.parametrize("part", ["names", "bugs"])
def test_none_is_there_twice(part: str) -> None:
    each = [
        mutation.name if part == "names" else (mutation.at, mutation.right, mutation.wrong) for mutation in CATALOGUE
    ]
    assert [what for what, count in Counter(each).items() if count > 1] == []


def test_bugs_can_be_planted_and_have_tests_to_meet() -> None:
    sources, suite = Sources(ROOT), Suite(ROOT)
    for mutation in CATALOGUE:
        sources.planted(mutation)
        suite.arguments(mutation)


_PROJECT = """\
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
    files = {"selfspec/__init__.py": _PROJECT, "tests/test_it.py": _TESTS, "pyproject.toml": ""}
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
