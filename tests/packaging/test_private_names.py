"""docs/dependencies.md lists every private name of other libraries that the code uses, and where."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A file, and what it uses of others.
Use = tuple[str, str]


def trees() -> dict[str, ast.Module]:
    files = sorted((ROOT / "selfspec").rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier() and name != "_"


def own_names(tree: ast.Module) -> Iterator[str]:
    """Names that the code itself defines: functions, classes, variables, parameters, and attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def looked_up(node: ast.AST) -> Iterator[str]:
    """Private names that a node looks up: attributes, parts of imports, and strings by which attributes are found."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("selfspec"):
        parts = [part for part in node.module.split(".") if is_private(part)]
        yield from parts or [alias.name for alias in node.names]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"getattr", "hasattr"}:
        names = (each.value for each in node.args[1:2] if isinstance(each, ast.Constant))
        yield from (name for name in names if isinstance(name, str))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        yield from (
            each.value for each in node.args[:1] if isinstance(each, ast.Constant) and isinstance(each.value, str)
        )
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        yield node.slice.value


def uses() -> set[Use]:
    found = trees()
    own = {name for tree in found.values() for name in own_names(tree)}
    return {
        (file, name)
        for file, tree in found.items()
        for node in ast.walk(tree)
        for name in looked_up(node)
        if is_private(name) and name not in own
    }


def listed() -> set[Use]:
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `selfspec/")]
    return {
        (file, name.split(".")[-1])
        for row in rows
        for file in re.findall(r"`([^`]+)`", row[1])
        for name in re.findall(r"`([^`]+)`", row[2])
    }


def test_every_private_name_is_listed_and_none_that_is_gone() -> None:
    assert uses() == listed()
