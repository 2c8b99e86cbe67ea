"""Entries are found by names and syntax, what is wrong with one is said with its remedy, and all of them are sound."""

from __future__ import annotations

import ast
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
