"""The layout rules: rooms and the arrows between them; what the engine needs; it knows no architecture by name."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import selfspec
from selfspec.adapters import ADAPTERS

ROOT = Path(__file__).resolve().parents[2]

# The rooms, from the ground up. A room imports the rooms that its line names, which stand above it here, and itself.
MAY_IMPORT = {
    room: set(others.split())
    for room, others in {
        "errors": "",
        "version": "",
        "compat": "errors",
        "arguments": "errors",
        "files": "errors",
        "process": "",
        "device": "",
        "kernels": "device errors files process",
        "formats": "errors kernels",
        "cache": "device errors kernels",
        "architecture": "cache compat errors",
        "adapters": "architecture compat",
        "model": "adapters architecture arguments cache compat device errors files formats kernels",
        "runtime": "architecture cache compat device errors formats kernels model process",
        "draft": "architecture arguments cache device errors files formats model runtime",
        "accept": "arguments cache device draft errors",
        "control": "arguments cache draft device errors files kernels model process version",
        "placement": "architecture arguments cache control device draft errors files formats kernels model process",
        "decode": "accept architecture arguments cache compat control device draft errors model runtime",
        "recipe": "accept control draft errors files version",
        "api": "accept architecture arguments control decode draft "
        "errors files model placement recipe runtime arguments",
        "saved": "api decode",
        "serve": "accept api arguments cache control decode draft errors model runtime version",
    }.items()
}
ENGINE = set(MAY_IMPORT)
# What tools are made of. It imports no tool.
MEASURE = "measure"
# What the command line is made of, and what lets Python run it.
FRONT = {"cli", "__main__"}

# What a model runs with: triton comes with torch where it runs; huggingface_hub and tokenizers with transformers.
# The package gguf is imported where a file of its kind is read, as transformers does.
LIBRARIES = {"torch", "transformers", "safetensors", "numpy", "huggingface_hub", "tokenizers", "triton", "gguf"}
# Architectures whose names a source may hold without meaning them.
ORDINARY_WORDS = {"beam", "git"}


def _modules() -> dict[str, Path]:
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
SOURCES = {module: path.read_text(encoding="utf-8") for module, path in MODULES.items()}


def _room(module: str) -> str:
    """The room of a module: of tools each is a room, as `tools.lab`; the package's front is "selfspec"."""
    below = module.split(".")[1:]
    if not below:
        return "selfspec"
    return ".".join(below[:2]) if below[0] == "tools" else below[0]


ENGINE_MODULES = sorted(module for module in MODULES if _room(module) in ENGINE)


@cache
def _nodes(source: str) -> list[ast.AST]:
    return [*ast.walk(ast.parse(source))]


@cache
def _imports(source: str, module: str) -> tuple[str, ...]:
    """The modules that a source imports, wherever in the source; `selfspec` itself if it takes a name from there."""
    return tuple(_imported(source, module))


def _imported(source: str, module: str) -> Iterator[str]:
    package = module.split(".")
    if MODULES[module].name != "__init__.py":
        package.pop()
    for node in _nodes(source):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for name in node.names:
                full = f"{base}.{name.name}"
                yield full if full in MODULES else base


def _imports_of(module: str) -> set[str]:
    return set(_imports(SOURCES[module], module))


def _allowed(room: str, other: str) -> bool:
    if room == other or room in {"selfspec", *FRONT}:
        return True
    if room in ENGINE:
        return other in MAY_IMPORT[room]
    if room == MEASURE:
        return other in ENGINE - {"serve"}
    # What tools share is the lab, which imports none of them.
    return other in ENGINE | {MEASURE, "tools"} or other == "tools.lab"


def _breaches(source: str, module: str) -> list[str]:
    found = [name for name in _imports(source, module) if name.partition(".")[0] == "selfspec"]
    return [name for name in found if not _allowed(_room(module), _room(name))]


def _words(source: str) -> Iterator[str]:
    """Every identifier and string literal of a source, docstrings included."""
    for node in _nodes(source):
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
    spelled = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", "\n".join(_words(source))).lower()
    return {
        name
        for name in ADAPTERS.keys() - ORDINARY_WORDS
        if name in spelled and re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", spelled)
    }


def test_the_top_of_the_package_shows_the_rooms_and_nothing_else() -> None:
    rooms = {_room(module).partition(".")[0] for module in MODULES} - {"selfspec"}
    assert rooms == {*ENGINE, MEASURE, "tools", *FRONT}


def test_a_module_imports_only_what_its_room_may() -> None:
    found = {module: _breaches(source, module) for module, source in SOURCES.items()}
    assert {module: names for module, names in found.items() if names} == {}


def test_arrows_of_the_engine_point_down() -> None:
    order = list(MAY_IMPORT)
    upward = [
        (room, other)
        for room, others in MAY_IMPORT.items()
        for other in others
        if order.index(other) > order.index(room)
    ]
    assert upward == []


def test_the_table_names_what_rooms_import_and_nothing_else() -> None:
    found: dict[str, set[str]] = {room: {room} for room in MAY_IMPORT}
    for module in ENGINE_MODULES:
        found[_room(module)] |= {_room(name) for name in _imports_of(module)} & ENGINE
    assert found == {room: {room, *others} for room, others in MAY_IMPORT.items()}


def test_no_two_modules_import_each_other() -> None:
    imports = {module: _imports_of(module) for module in MODULES}
    mutual = [
        (module, other)
        for module, names in imports.items()
        for other in names
        if module < other and module in imports.get(other, ())
    ]
    assert mutual == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("selfspec.draft.early_exit", "from .. import cli"),
        ("selfspec.draft.early_exit", "def late():\n    from selfspec.measure.costs import anything"),
        ("selfspec.draft.early_exit", "if TYPE_CHECKING:\n    from selfspec.decode.batch import Batch"),
        ("selfspec.measure.costs", "from selfspec.tools.lab import anything"),
        ("selfspec.saved", "from selfspec import wrap"),
        ("selfspec.tools.verify.verification", "from selfspec.tools.train.run import train"),
        ("selfspec.tools.lab.arms", "from selfspec.tools.verify.verification import verify"),
    ],
)
def test_an_import_from_above_is_seen(module: str, source: str) -> None:
    assert _breaches(source, module)


def _needed(starts: set[str]) -> dict[str, str]:
    """The packages beside selfspec and Python's own that modules need when they run, each with a module that does."""
    found, seen, waiting = {}, set(), list(starts)
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        running = re.sub(r"^if TYPE_CHECKING:\n(?:    .*\n|\n)+", "", SOURCES[module], flags=re.MULTILINE)
        for name in _imports(running, module):
            parts = name.split(".")
            if parts[0] == "selfspec":
                above = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
                waiting += [each for each in above if each in MODULES]
            elif parts[0] not in sys.stdlib_module_names:
                found[parts[0]] = module
    return found


def test_the_engine_imports_what_a_model_runs_with() -> None:
    found = _needed({"selfspec.api", *(module for module in MODULES if _room(module) == "adapters")})
    assert {"torch", "transformers"} <= set(found)
    assert {package: module for package, module in found.items() if package not in LIBRARIES} == {}
    assert {"typer", "rich", "pydantic", "scipy"} <= set(_needed({"selfspec.cli.app", "selfspec.cli.bench"}))


def test_core_names_no_architecture() -> None:
    core = [name for name in ENGINE_MODULES if _room(name) != "adapters"]
    found = {name: _architectures(SOURCES[name]) for name in core}
    assert {name: named for name, named in found.items() if named} == {}


@pytest.mark.parametrize(
    "source",
    [
        "'llama'",
        "is_llama = True",
        "transformers.GPT2LMHeadModel",
        "def gpt2_layers(): ...",
    ],
)
def test_an_architecture_is_seen(source: str) -> None:
    assert _architectures(source)


def test_all_names_everything_the_package_offers() -> None:
    tree = ast.parse(SOURCES["selfspec"])
    for_type_checkers = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in for_type_checkers.body if isinstance(node, ast.ImportFrom)]
    offered = {name.asname or name.name for node in imports for name in node.names}
    assert set(selfspec.__all__) == offered | {"__version__"}
    assert all(hasattr(selfspec, name) for name in selfspec.__all__)
    assert not hasattr(selfspec, "no_such_name")


def test_adapters_are_a_subpackage_and_the_link_is_the_same_folder() -> None:
    assert selfspec.adapters.__name__ == "selfspec.adapters"
    link = ROOT / "selfspec" / "adapters"
    # A source distribution carries no link, and installs do not need it.
    assert not link.exists() or link.samefile(ROOT / "adapters")
    assert (ROOT / "selfspec" / "py.typed").is_file()
