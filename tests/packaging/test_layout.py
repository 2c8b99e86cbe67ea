"""The layout rules: rooms and the arrows between them; the engine knows no architecture by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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
        "kernels": "device errors process",
        "formats": "errors kernels",
        "cache": "device errors kernels",
        "architecture": "cache compat errors",
        "adapters": "architecture compat",
        "model": "adapters architecture arguments cache compat errors files formats kernels",
        "runtime": "architecture cache compat device errors formats kernels model process",
        "draft": "architecture arguments cache device errors files formats model runtime",
        "accept": "arguments cache device draft errors",
        "control": "architecture arguments cache draft device errors files kernels model version",
        "placement": "architecture arguments cache control draft errors formats model process",
        "decode": "accept architecture arguments cache compat control device draft errors kernels model runtime",
        "recipe": "accept control draft errors files version",
        "api": "accept architecture arguments control decode device draft "
        "errors files model placement recipe runtime arguments",
        "saved": "api decode recipe",
        "serve": "api arguments cache decode errors model version",
    }.items()
}
ENGINE = set(MAY_IMPORT)
# What tools are made of. It imports no tool.
MEASURE = "measure"
# What the command line is made of, and what lets Python run it.
FRONT = {"cli", "__main__"}


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


def _room(module: str) -> str:
    """The room of a module: of tools each is a room, as `tools.lab`; the package's front is "selfspec"."""
    below = module.split(".")[1:]
    if not below:
        return "selfspec"
    return ".".join(below[:2]) if below[0] == "tools" else below[0]


ENGINE_MODULES = sorted(module for module in MODULES if _room(module) in ENGINE)


def _imports(source: str, module: str, is_package: bool) -> Iterator[str]:
    """The modules that a source imports, wherever in the source; `selfspec` itself if it takes a name from there."""
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


def _imports_of(module: str) -> list[str]:
    path = MODULES[module]
    return list(_imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"))


def _allowed(room: str, other: str) -> bool:
    """Whether a module of one room may import one of another."""
    if room == other or room in {"selfspec", *FRONT}:
        return True
    if room in ENGINE:
        return other in MAY_IMPORT[room]
    if room == MEASURE:
        return other in ENGINE - {"serve"}
    # What tools share is the lab, which imports none of them.
    return other in ENGINE | {MEASURE, "tools"} or other == "tools.lab"


def _breaches(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports that a module may not have, by its room."""
    found = [name for name in _imports(source, module, is_package) if name.partition(".")[0] == "selfspec"]
    return [name for name in found if not _allowed(_room(module), _room(name))]


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
    spelled = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", "\n".join(_words(source))).lower()
    return {
        name
        for name in ADAPTERS.keys() - ORDINARY_WORDS
        if name in spelled and re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", spelled)
    }


def test_the_search_finds_the_package() -> None:
    assert {"selfspec", "selfspec.decode.loop", "selfspec.draft.early_exit", "selfspec.adapters"} <= MODULES.keys()
    assert {"selfspec.decode.loop", "selfspec.accept", "selfspec.adapters"} <= set(ENGINE_MODULES)


def test_the_top_of_the_package_shows_the_rooms_and_nothing_else() -> None:
    rooms = {_room(module).partition(".")[0] for module in MODULES} - {"selfspec"}
    assert rooms == {*ENGINE, MEASURE, "tools", *FRONT}


def test_a_module_imports_only_what_its_room_may() -> None:
    found = {
        module: _breaches(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
        for module, path in MODULES.items()
    }
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
    found: dict[str, set[str]] = {room: set() for room in MAY_IMPORT}
    for module in ENGINE_MODULES:
        found[_room(module)] |= {_room(name) for name in _imports_of(module)}
    for room, others in found.items():
        assert others & ENGINE - {room} == MAY_IMPORT[room], room


def test_no_two_modules_import_each_other() -> None:
    imports = {module: set(_imports_of(module)) for module in MODULES}
    mutual = [
        (module, other)
        for module, names in imports.items()
        for other in names
        if module < other and module in imports.get(other, set())
    ]
    assert mutual == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("selfspec.draft.early_exit", "import selfspec.cli.app"),
        ("selfspec.draft.early_exit", "from selfspec.tools.lab import anything"),
        ("selfspec.draft.early_exit", "from .. import cli"),
        ("selfspec.draft.early_exit", "from ..tools.train import course"),
        ("selfspec.draft.early_exit", "def late():\n    from selfspec.measure.costs import anything"),
        ("selfspec.model.view", "from selfspec.decode.batch import Batch"),
        ("selfspec.cache.masks", "from selfspec.draft import Drafter"),
        ("selfspec.kernels.native", "from selfspec.model.view import view_of"),
        ("selfspec.draft.early_exit", "from selfspec.decode.batch import Batch"),
        ("selfspec.draft.early_exit", "if TYPE_CHECKING:\n    from selfspec.decode.batch import Batch"),
        ("selfspec.cache.masks", "if TYPE_CHECKING:\n    from selfspec.decode.batch import Batch"),
        ("selfspec.measure.costs", "from selfspec.tools.lab import anything"),
        ("selfspec.measure.costs", "from selfspec.serve.app import anything"),
        ("selfspec.serve.app", "from selfspec.measure.stock import anything"),
        ("selfspec.api", "from selfspec.serve.app import anything"),
        ("selfspec.saved.custom_generate", "from selfspec import wrap"),
        ("selfspec.tools.verify.verification", "from selfspec.tools.train.run import train"),
        ("selfspec.tools.lab.arms", "from selfspec.tools.verify.verification import verify"),
        ("selfspec.tools.lab.arms", "from selfspec.cli.app import app"),
    ],
)
def test_an_import_from_above_is_seen(module: str, source: str) -> None:
    assert _breaches(source, module)


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from selfspec.model.layer_path import LayerPath",
        "from . import drafter",
        "from ..model.gated_view import GatedModel",
    ],
)
def test_an_import_within_the_engine_is_allowed(source: str) -> None:
    assert not _breaches(source, "selfspec.draft.early_exit")


def test_core_names_no_architecture() -> None:
    core = [name for name in ENGINE_MODULES if _room(name) != "adapters"]
    found = {name: _architectures(MODULES[name].read_text(encoding="utf-8")) for name in core}
    assert {name: named for name, named in found.items() if named} == {}


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


def test_a_module_says_in_its_first_line_what_it_is_for() -> None:
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstring = ast.get_docstring(tree, clean=False)
        assert docstring, module
        assert docstring.splitlines()[0].strip(), module
        assert tree.body[0].lineno == 1, module


def test_all_names_everything_the_package_offers() -> None:
    tree = ast.parse(MODULES["selfspec"].read_text(encoding="utf-8"))
    for_type_checkers = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in for_type_checkers.body if isinstance(node, ast.ImportFrom)]
    offered = {name.asname or name.name for node in imports for name in node.names}
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
