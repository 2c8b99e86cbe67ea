"""Where a bug is planted: a definition by its dotted name, and in it a piece of code by its syntax."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from mutations.catalogue import Mutation

_CODE = ("selfspec", "adapters")
_PLACEHOLDER = re.compile(r"_[1-9]")
_NO_SYNTAX = {"ctx", "kind", "type_comment"}

_Node = ast.expr | ast.stmt


class AnchorError(Exception):
    """A bug cannot be planted. The message names the entry and says what to change in it."""


@dataclass(frozen=True)
class Planted:
    """A file with a bug in it.

    Attributes:
        file: where, from the root of the project.
        text: the whole file.
    """

    file: Path
    text: str


@dataclass(frozen=True)
class _Definition:
    name: str
    file: Path
    node: ast.AST


@dataclass(frozen=True)
class _Match:
    """Code that was found: its nodes, one expression or statements in a row, and what each placeholder matched."""

    definition: _Definition
    nodes: Sequence[_Node]
    bound: dict[str, ast.expr]


class Sources:
    """The code of a project by definition, whichever file it is in.

    Args:
        root: the root of the project.

    Raises:
        SyntaxError: a file is not Python.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._definitions: list[_Definition] = []
        for file in sorted(path for folder in _CODE for path in (root / folder).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            self._definitions += _definitions(tree, "", file.relative_to(root))

    def planted(self, mutation: Mutation) -> Planted:
        """Plant a bug in the one file that has its anchor.

        Raises:
            AnchorError: the anchor is not found exactly once, or the bug changes nothing or does not compile.
        """
        right = _parsed(mutation.right, mutation)
        definitions = [each for each in self._definitions if each.name == mutation.at]
        matches = [match for each in definitions for match in _matches(right, each)]
        if len(matches) != 1:
            raise AnchorError(f"{mutation.name!r}: {self._remedy(mutation, right, definitions, len(matches))}")
        file = matches[0].definition.file
        before = (self._root / file).read_text(encoding="utf-8")
        after = _replaced(before, matches[0], _parsed(mutation.wrong, mutation))
        try:
            changed = ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
            compile(after, str(file), "exec", dont_inherit=True)
        except SyntaxError as error:
            raise AnchorError(f"{mutation.name!r}: {file} does not compile with the bug in it: {error}") from error
        if not changed:
            raise AnchorError(f"{mutation.name!r}: `wrong` is the same code as `right`. Write what is wrong.")
        return Planted(file, after)

    def _remedy(self, mutation: Mutation, right: list[_Node], definitions: list[_Definition], found: int) -> str:
        files = ", ".join(str(each.file) for each in definitions)
        if found:
            return f"`right` is found {found} times in {mutation.at} ({files}). Take in more of the code around it."
        missing = (
            f"`right` is not in {mutation.at} ({files})" if definitions else f"nothing is defined as {mutation.at}"
        )
        # Inner definitions come after outer ones, and say more.
        elsewhere = {str(each.file): each.name for each in self._definitions if any(_matches(right, each))}
        if elsewhere:
            places = ", ".join(f"{name} ({file})" for file, name in elsewhere.items())
            return f"{missing}; this code is in {places}. Correct `at`."
        return f"{missing}, nor anywhere else. Write `at`, `right` and `wrong` for the code that does this today."


def _definitions(node: ast.AST, prefix: str, file: Path) -> Iterator[_Definition]:
    """All functions and classes, and what a name is given at the top of a module or class; outer ones first."""
    for child in ast.iter_child_nodes(node):
        names = []
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [child.name]
        elif isinstance(node, ast.Module | ast.ClassDef) and isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        for name in names:
            yield _Definition(f"{prefix}{name}", file, child)
        inner = f"{prefix}{names[0]}." if names else prefix
        yield from _definitions(child, inner, file)


def _parsed(code: str, mutation: Mutation) -> list[_Node]:
    try:
        statements: list[_Node] = [*ast.parse(code).body]
    except SyntaxError as error:
        raise AnchorError(f"{mutation.name!r}: {code!r} is no whole expression, and no whole statements.") from error
    if len(statements) == 1 and isinstance(statements[0], ast.Expr):
        return [statements[0].value]
    return statements


def _matches(pattern: list[_Node], definition: _Definition) -> Iterator[_Match]:
    for nodes in _candidates(definition.node, len(pattern)):
        bound: dict[str, ast.expr] = {}
        if _alike(pattern, nodes, bound):
            yield _Match(definition, nodes, bound)


def _candidates(node: ast.AST, count: int) -> Iterator[list[_Node]]:
    """Every expression, and every `count` statements that follow each other, of a piece of code and within it."""
    if isinstance(node, ast.JoinedStr):
        return  # In Python 3.11 what is within has no place in the text.
    if isinstance(node, _Node) and count == 1:
        yield [node]
    for _, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        if count > 1:
            for start in range(len(children) - count + 1):
                if all(isinstance(child, ast.stmt) for child in children[start : start + count]):
                    yield children[start : start + count]
        for child in children:
            if isinstance(child, ast.AST):
                yield from _candidates(child, count)


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


def _replaced(text: str, match: _Match, wrong: list[_Node]) -> str:
    """The text of a file with other nodes in the place of those that matched."""
    filled = [_Filled(match.bound).visit(copy.deepcopy(node)) for node in wrong]
    first = match.nodes[0]
    if isinstance(first, ast.expr) and isinstance(filled[0], ast.expr):
        code = f"({ast.unparse(filled[0])})"
    else:
        code = "\n".join(map(ast.unparse, filled)).replace("\n", "\n" + " " * first.col_offset)
    # Columns count bytes.
    lines = text.encode().splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]
    start = starts[first.lineno - 1] + first.col_offset
    last = match.nodes[-1]
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    end = starts[last.end_lineno - 1] + last.end_col_offset
    return (text.encode()[:start] + code.encode() + text.encode()[end:]).decode()
