"""The layout rules: the core stands alone and knows no architecture by name, and everything says what it is for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import selfspec
from selfspec.adapters import ADAPTERS

ROOT = Path(__file__).resolve().parents[2]

# What stands on top of the core: modules and packages right under selfspec/. Everything else is core, so a new module
# is held to the rules of the core unless it is named here.
ON_TOP = {
    "__main__",
    "ablation",
    "anatomy",
    "bench",
    "calibrate",
    "checkpoint",
    "cli",
    "demo",
    "draft_cost",
    "measure",
    "recipe",
    "saved",
    "search",
    "train",
    "verify",
    "wrapped",
}


# Architectures whose names a source may hold without meaning them.
ORDINARY_WORDS = {"beam", "git"}


def _modules() -> dict[str, Path]:
    """The file of every module of the package, by its dotted name."""
    modules = {}
    for folder, package in (("selfspec", ("selfspec",)), ("adapters", ("selfspec", "adapters"))):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder).with_suffix("")
            through_link = folder == "selfspec" and inside.parts[0] == "adapters"
            if not through_link:
                parts = inside.parts[:-1] if inside.name == "__init__" else inside.parts
                modules[".".join((*package, *parts))] = path
    return modules


MODULES = _modules()


def _is_core(module: str) -> bool:
    below = module.split(".")[1:]
    return bool(below) and below[0] not in ON_TOP


CORE = sorted(filter(_is_core, MODULES))


def _imports(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Every module that a source imports, wherever in the source: `selfspec` itself if it takes a name from there."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for name in node.names:
                full = f"{base}.{name.name}"
                yield full if full in MODULES else base


def _breaches(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports that a module of the core may not have: those on top of it, and the package's front, which holds both."""
    return [
        name
        for name in _imports(source, module, is_package)
        if name == "selfspec" or (name.startswith("selfspec.") and not _is_core(name))
    ]


def _words(source: str) -> Iterator[str]:
    """Every identifier and string literal of a source, docstrings included."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) | ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text):
                yield text
            case ast.FunctionDef(name=text) | ast.ClassDef(name=text):
                yield text
            case ast.keyword(arg=str(text)):
                yield text
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (name.name for name in names)


def _architectures(source: str) -> set[str]:
    """The architectures that a source names as a whole word, in whatever case: `gpt2`, `is_gpt2`, `GPT2Model`."""
    spelled = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower() for text in _words(source)]
    return {
        name
        for name in ADAPTERS.keys() - ORDINARY_WORDS
        if any(re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", text) for text in spelled)
    }


def test_the_search_finds_the_package() -> None:
    assert {"selfspec", "selfspec.generate", "selfspec.draft.early_exit", "selfspec.adapters"} <= MODULES.keys()
    assert {"selfspec.generate", "selfspec.accept", "selfspec.adapters"} <= set(CORE)


@pytest.mark.parametrize("module", CORE)
def test_core_imports_nothing_that_stands_on_it(module: str) -> None:
    path = MODULES[module]
    assert _breaches(path.read_text(encoding="utf-8"), module, path.name == "__init__.py") == []


@pytest.mark.parametrize(
    "source",
    [
        "import selfspec",
        "import selfspec.cli.app",
        "from selfspec import wrap",
        "from selfspec.bench import anything",
        "from .. import cli",
        "from ..train import loop",
        "def late():\n    from selfspec.search import anything",
    ],
)
def test_an_import_from_above_is_seen(source: str) -> None:
    assert _breaches(source, "selfspec.draft.early_exit")


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from selfspec import path",
        "from selfspec.path import Path",
        "from . import drafter",
        "from ..gate import GatedModel",
    ],
)
def test_an_import_within_the_core_is_allowed(source: str) -> None:
    assert not _breaches(source, "selfspec.draft.early_exit")


@pytest.mark.parametrize("module", [name for name in CORE if not name.startswith("selfspec.adapters")])
def test_core_names_no_architecture(module: str) -> None:
    assert _architectures(MODULES[module].read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    "source",
    [
        "'llama'",
        "kind == 'llama' or other",
        "is_llama = True",
        "from transformers import LlamaConfig",
        "transformers.GPT2LMHeadModel",
        "def gpt2_layers(): ...",
        "f'{size} of llama'",
    ],
)
def test_an_architecture_is_seen(source: str) -> None:
    assert _architectures(source)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_says_in_its_first_line_what_it_is_for(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    docstring = ast.get_docstring(tree, clean=False)
    assert docstring
    assert docstring.splitlines()[0].strip()
    assert tree.body[0].lineno == 1


def test_all_names_everything_the_package_offers() -> None:
    tree = ast.parse(MODULES["selfspec"].read_text(encoding="utf-8"))
    for_type_checkers = next(node for node in tree.body if isinstance(node, ast.If))
    offered = {name.name for node in for_type_checkers.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert set(selfspec.__all__) == offered | {"__version__"}
    assert all(hasattr(selfspec, name) for name in selfspec.__all__)
    assert not hasattr(selfspec, "no_such_name")


def test_all_is_sorted() -> None:
    def constants_then_classes_then_the_rest(name: str) -> tuple[bool, bool, str]:
        return not name.isupper(), not name[0].isupper(), name

    assert list(selfspec.__all__) == sorted(set(selfspec.__all__), key=constants_then_classes_then_the_rest)


def test_adapters_are_a_subpackage_and_the_link_is_the_same_folder() -> None:
    assert selfspec.adapters.__name__ == "selfspec.adapters"
    link = ROOT / "selfspec" / "adapters"
    # A source distribution carries no link, and installs do not need it.
    assert not link.exists() or link.samefile(ROOT / "adapters")


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "selfspec" / "py.typed").is_file()


def test_test_files_have_names_of_their_own() -> None:
    """Pytest imports them by these names, and stops at the second of a name, though each passes by itself."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
