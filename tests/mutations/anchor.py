"""What an entry of the catalogue names: code, by a dotted name and its syntax, and tests, wherever they are."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutations.catalogue import Mutation

_CODE = ("selfspec", "adapters")
_PLACEHOLDER = re.compile(r"_[1-9]")
_NO_SYNTAX = {"ctx", "kind", "type_comment"}
_TEST = re.compile(r"^def (test_\w+)", re.MULTILINE)
_OF_NAME = re.compile(r"(?:(?P<file>test_\w+\.py)(?:::|$))?(?P<function>test_\w+)?(?P<parameters>\[.*\])?")


class EntryError(Exception):
    """A bug cannot be planted or its tests are not found. The message names the entry and what to change in it."""


@dataclass(frozen=True)
class Planted:
    """A file with a bug in one of its statements: those before it, what takes its place, and those after it."""

    file: Path
    statements: Sequence[ast.stmt]

    @property
    def text(self) -> str:
        return ast.unparse(ast.Module([*self.statements], []))


@dataclass(frozen=True)
class _Definition:
    """A definition by its dotted name, and the place of the statement of its file that it is in."""

    name: str
    file: Path
    place: int
    node: ast.AST


@dataclass(frozen=True)
class _Match:
    """Code that was found: its nodes, one expression or statements in a row, and what each placeholder matched."""

    within: _Definition
    nodes: Sequence[ast.AST]
    bound: dict[str, ast.expr]


class Sources:
    """The code of a project by definition, whichever file it is in."""

    def __init__(self, root: Path) -> None:
        files = sorted(path for folder in _CODE for path in (root / folder).rglob("*.py"))
        self._trees = {file.relative_to(root): ast.parse(file.read_text(encoding="utf-8")) for file in files}
        self._definitions = [
            _Definition(name, file, place, node)
            for file, tree in self._trees.items()
            for place, statement in enumerate(tree.body)
            for name, node in _definitions(ast.Module([statement], []), "")
        ]

    def planted(self, mutation: Mutation) -> Planted:
        """Plant a bug in the one file that has its anchor; refuse one that changes nothing or does not compile."""
        right, wrong = _parsed(mutation.right, mutation), _parsed(mutation.wrong, mutation)
        if all(len(part) == 1 and isinstance(part[0], ast.Expr) for part in (right, wrong)):
            right, wrong = ([part[0].value] for part in (right, wrong))  # type: ignore[attr-defined]
        places = [each for each in self._definitions if each.name == mutation.at]
        matches = [match for each in places for match in _matches(right, each)]
        if len(matches) != 1:
            files = ", ".join(str(each.file) for each in places)
            raise EntryError(f"{mutation.name!r}: {self._remedy(mutation, right, files, len(matches))}")
        (match,) = matches
        file, place = match.within.file, match.within.place
        body = self._trees[file].body
        # Only the statement that is changed is copied, written and compiled: files are long, and bugs are many.
        memo: dict[int, ast.AST] = {}
        changed = ast.Module([copy.deepcopy(body[place], memo)], [])
        filled = [_Filled(match.bound).visit(each) for each in wrong]
        changed = _Planting([memo[id(node)] for node in match.nodes], filled).visit(changed)
        after = ast.unparse(changed)
        try:
            compile(after, str(file), "exec", dont_inherit=True)
        except SyntaxError as error:
            raise EntryError(f"{mutation.name!r}: {file} does not compile with the bug in it: {error}") from error
        if after == ast.unparse(body[place]):
            raise EntryError(f"{mutation.name!r}: `wrong` is the same code as `right`. Write what is wrong.")
        return Planted(file, [*body[:place], *changed.body, *body[place + 1 :]])

    def _remedy(self, mutation: Mutation, right: list[ast.AST], files: str, found: int) -> str:
        if found:
            return f"`right` is found {found} times in {mutation.at} ({files}). Take in more of the code around it."
        missing = f"`right` is not in {mutation.at} ({files})" if files else f"nothing is defined as {mutation.at}"
        # Inner definitions come after outer ones, and say more.
        elsewhere = {str(each.file): each.name for each in self._definitions if any(_matches(right, each))}
        if elsewhere:
            places = ", ".join(f"{name} ({file})" for file, name in elsewhere.items())
            return f"{missing}; this code is in {places}. Correct `at`."
        return f"{missing}, nor anywhere else. Write `at`, `right` and `wrong` for the code that does this today."


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """All functions and classes, and what a name is given at the top of a module or class; outer ones first."""
    for child in ast.iter_child_nodes(node):
        names = []
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [child.name]
        elif isinstance(node, ast.Module | ast.ClassDef) and isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        for name in names:
            yield f"{prefix}{name}", child
        yield from _definitions(child, f"{prefix}{names[0]}." if names else prefix)


def _parsed(code: str, mutation: Mutation) -> list[ast.AST]:
    try:
        return [*ast.parse(code).body]
    except SyntaxError as error:
        raise EntryError(f"{mutation.name!r}: {code!r} is no whole expression, and no whole statements.") from error


def _matches(pattern: list[ast.AST], within: _Definition) -> Iterator[_Match]:
    """Find a pattern in a piece of code and within it."""
    # Each node by itself, and those of a list in a row.
    rows = [[within.node], *(value for each in ast.walk(within.node) for _, value in ast.iter_fields(each))]
    for row in (each if isinstance(each, list) else [each] for each in rows):
        for start in range(len(row) - len(pattern) + 1):
            nodes, bound = row[start : start + len(pattern)], dict[str, ast.expr]()
            if type(nodes[0]) is type(pattern[0]) and _alike(pattern, nodes, bound):
                yield _Match(within, nodes, bound)


def _alike(pattern: object, code: object, bound: dict[str, ast.expr]) -> bool:
    """Whether code has the syntax of a pattern; a placeholder matches any expression, and the same one throughout."""
    if isinstance(pattern, ast.Name) and _PLACEHOLDER.fullmatch(pattern.id):
        return isinstance(code, ast.expr) and _alike(bound.setdefault(pattern.id, code), code, {})
    if type(pattern) is not type(code):
        return False
    if isinstance(pattern, ast.AST):
        fields = set(pattern._fields) - _NO_SYNTAX
        return all(_alike(getattr(pattern, field), getattr(code, field), bound) for field in sorted(fields))
    if isinstance(pattern, list) and isinstance(code, list):
        return len(pattern) == len(code) and all(map(_alike, pattern, code, [bound] * len(code)))
    return pattern == code


class _Filled(ast.NodeTransformer):
    def __init__(self, bound: dict[str, ast.expr]) -> None:
        self._bound = bound

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._bound.get(node.id, node)


class _Planting(ast.NodeTransformer):
    """Puts code in the place of nodes that follow each other."""

    def __init__(self, nodes: Sequence[ast.AST], wrong: Sequence[ast.AST]) -> None:
        self._nodes, self._wrong = nodes, wrong

    def visit(self, node: ast.AST) -> Any:
        if node is self._nodes[0]:
            return self._wrong[0] if isinstance(node, ast.expr) else self._wrong
        return None if any(node is each for each in self._nodes) else self.generic_visit(node)


class Suite:
    """The tests of a project, by function and by file."""

    def __init__(self, root: Path) -> None:
        files = sorted((root / "tests").rglob("test_*.py"))
        self._functions = {
            str(file.relative_to(root)): set(_TEST.findall(file.read_text(encoding="utf-8"))) for file in files
        }

    def arguments(self, mutation: Mutation) -> list[str]:
        """What pytest is to be given, in the root of the project, to run the tests that an entry names."""
        return [self._resolved(each, mutation) if each.startswith("test_") else each for each in mutation.tests]

    def _resolved(self, name: str, mutation: Mutation) -> str:
        parts = _OF_NAME.fullmatch(name)
        file, function = (parts["file"], parts["function"]) if parts else (None, name)
        found = [
            path
            for path, functions in self._functions.items()
            if (file is None or Path(path).name == file) and (function is None or function in functions)
        ]
        if len(found) != 1:
            where = f" ({', '.join(found)}): name the file too, as in test_file.py::{function}" if found else ""
            raise EntryError(
                f"{mutation.name!r}: {len(found)} tests below tests/ are named {name}{where}. "
                "Correct `tests` of the entry."
            )
        return "::".join([found[0], *([f"{function}{parts['parameters'] or ''}"] if parts and function else [])])
