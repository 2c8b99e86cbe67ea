"""What each command prints with `--output json`, as pydantic models made of the dataclasses that commands return.

The site's tables are made of them, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import reduce
from inspect import cleandoc
from operator import or_
from types import SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from selfspec.cli.app import app
from selfspec.cli.outcome import SCHEMA_VERSION, Failure
from selfspec.decode.output import RowRound
from selfspec.measure.estimate import Estimate
from selfspec.measure.spare_cores import SpareCores
from selfspec.placement.pack import PackedFolder
from selfspec.tools.doctor import MachineReport, Packages
from selfspec.tools.export import Exported
from selfspec.tools.prospects import CheckpointSummary

# Commands and results name these for type checkers alone, so that no command imports what it does not need.
_ELSEWHERE = {
    each.__name__: each
    for each in (CheckpointSummary, Estimate, Exported, MachineReport, Packages, PackedFolder, RowRound, SpareCores)
}
_ATTRIBUTE = re.compile(r"^    (\w+): (.+?)(?=^    \w+: |\Z)", re.MULTILINE | re.DOTALL)
_VERSION: Any = (
    Literal[SCHEMA_VERSION],
    Field(description="Of this format. Fields may be added within a version; none is removed or changes its meaning."),
)


def _results(group: Any, before: str = "") -> Iterator[tuple[str, type[Any]]]:
    """Yield the dataclass that each command returns, with the command's words."""
    for info in group.registered_commands:
        command = info.callback.__wrapped__
        returned = SimpleNamespace(__annotations__={"return": command.__annotations__["return"]})
        hint = get_type_hints(returned, command.__globals__, _ELSEWHERE)["return"]
        result: Any = next(each for each in (hint, *get_args(hint)) if is_dataclass(each))
        yield before + (info.name or command.__name__), result
    for info in group.registered_groups:
        yield from _results(info.typer_instance, f"{info.typer_instance.info.name} ")


def _model(kind: Any) -> type[BaseModel]:
    """Make the model of a dataclass: all fields and no others, each with what the docstring says of it."""
    about, *_ = cleandoc(kind.__doc__ or "").partition("\n\nAttributes:\n")
    docs = (cleandoc(each.__doc__ or "").partition("\n\nAttributes:\n")[2] for each in reversed(kind.__mro__))
    said = {name: " ".join(words.split()) for each in docs for name, words in _ATTRIBUTE.findall(each)}
    hints = get_type_hints(kind, localns=_ELSEWHERE)
    # What is None by default is left out where it is None; all else is printed.
    declared: dict[str, Any] = {
        each.name: (
            _hint(hints[each.name]),
            Field(None if each.default is None else ..., description=said.get(each.name)),
        )
        for each in fields(kind)
    }
    about = " ".join(about.split())
    return create_model(kind.__name__, __config__=ConfigDict(extra="forbid"), __doc__=about, **declared)


def _hint(hint: Any) -> Any:
    """Put models in place of the dataclasses that a type is made of."""
    if is_dataclass(hint):
        return _model(hint)
    parts = tuple(map(_hint, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return reduce(or_, parts)
    return get_origin(hint)[parts] if parts and get_origin(hint) is not Literal else hint


def _output(result: type[BaseModel]) -> type[BaseModel]:
    added: dict[str, Any] = {
        "schema_version": _VERSION,
        "versions": (dict[str, str], Field(description="of what ran")),
        "error": (_FAILURE | None, Field(None, description="what ended the command, where it failed")),
    }
    return create_model(result.__name__, __base__=result, __doc__=result.__doc__, **added)


_FAILURE = _model(Failure)

OUTPUTS = {command: _output(_model(result)) for command, result in _results(app)}
"""Maps the words of each command to what it prints, unless it failed before it had a result: see `Failed`."""

Failed: Any = create_model(
    "Failed",
    __config__=ConfigDict(extra="forbid"),
    __doc__="A command that failed before it had a result.",
    schema_version=_VERSION,
    error=(_FAILURE, ...),
)
"""What any command prints that failed before it had a result."""
