"""Private names of other libraries that the code uses are in docs/dependencies.md; calls with a prompt have a mask."""

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
    match node:
        case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
            yield name
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(name)), *_]):
            yield name
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            yield name


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


# Without a mask `transformers` takes the padding token for padding. These hand on what they were given, mask or none.
HANDS_ON = {Path("selfspec/saved/custom_generate.py"), Path("selfspec/decode/request.py")}
CALLS = ("generate", "stream")


def test_every_call_with_a_prompt_has_a_mask() -> None:
    files = [*(ROOT / "selfspec").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    calls = {f"{file.relative_to(ROOT)}:{call.lineno}": call for file in files for call in _calls(file)}
    assert len(calls) > 20
    assert not [place for place, call in calls.items() if not _has_mask(call)]


def _calls(file: Path) -> list[ast.Call]:
    if file.relative_to(ROOT) in HANDS_ON:
        return []
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    methods = [
        (node, node.func) for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    # Another engine's prompts are texts, and a stream of a device is none of tokens.
    others = ("torch.cuda.stream", "self._backend.stream", "engine.generate")
    return [call for call, method in methods if method.attr in CALLS and ast.unparse(method) not in others]


def _has_mask(call: ast.Call) -> bool:
    """Whether it is an argument; where ids and mask come as a whole, as keywords, there is no first one either."""
    return len(call.args) != 1 or any(each.arg == "attention_mask" for each in call.keywords)
