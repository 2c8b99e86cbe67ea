"""Private names of other libraries are in docs/dependencies.md; calls with a prompt have a mask.

README, versions, Pythons and forms for reports say the same as the code.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from transformers.utils import logging

import selfspec
from helpers.snippets import ROOT, snippets

# A file, and what it uses of others.
Use = tuple[str, str]


def trees() -> dict[str, ast.Module]:
    files = sorted((ROOT / "selfspec").rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier() and name != "_"


def own_names(tree: ast.Module) -> Iterator[str]:
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
HANDS_ON = {Path("selfspec/saved.py"), Path("selfspec/decode/request.py")}
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
    others = ("self._backend.stream", "engine.generate")
    return [call for call, method in methods if method.attr in CALLS and ast.unparse(method) not in others]


def _has_mask(call: ast.Call) -> bool:
    """Whether it is an argument; where ids and mask come as a whole, as keywords, there is no first one either."""
    return len(call.args) != 1 or any(each.arg == "attention_mask" for each in call.keywords)


PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(file: str) -> Any:
    return yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    citation = read("CITATION.cff")
    assert (citation["version"], citation["license"]) == (selfspec.__version__, PROJECT["license"])


def test_the_workflow_runs_every_python_and_the_oldest_versions() -> None:
    quick = read(".github/workflows/tests.yml")["jobs"]["quick"]["strategy"]["matrix"]
    prefix = "Programming Language :: Python :: 3."
    supported = [f"3.{each.removeprefix(prefix)}" for each in PROJECT["classifiers"] if each.startswith(prefix)]
    assert quick["python"] == supported
    wanted = " ".join(f"{name}=={version}.*" for name, version in _oldest(["torch", "transformers"]))
    assert wanted in [each["versions"] for each in quick["include"]]


def _oldest(names: list[str]) -> list[tuple[str, str]]:
    ranges = {found.name: found.specifier for found in map(Requirement, PROJECT["dependencies"])}
    lowest = {name: min(Version(each.version) for each in ranges[name]) for name in names}
    return [(name, f"{version.major}.{version.minor}") for name, version in lowest.items()]


@pytest.mark.parametrize(("template", "asked"), [("bug", "selfspec doctor"), ("idea", "")])
def test_an_issue_template_has_what_a_form_needs(template: str, asked: str) -> None:
    form = read(f".github/ISSUE_TEMPLATE/{template}.yml")
    assert form["name"]
    assert form["description"]
    labels = [field["attributes"]["label"] for field in form["body"]]
    assert all(labels)
    assert any(asked in label for label in labels)


def test_the_first_lines_print_what_readme_says() -> None:
    printed = io.StringIO()
    bars = logging.is_progress_bar_enabled()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(snippets("README.md", "python")[0], "README.md", "exec"), {})
    finally:
        if bars:
            logging.enable_progress_bar()
    assert printed.getvalue() == snippets("README.md", "text")[0]


def test_the_demo_is_reached_by_its_name_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, selfspec; assert 'selfspec.measure.embedded' not in sys.modules; "
        "assert (selfspec.demo.checkpoint_folder() / 'config.json').is_file(); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
