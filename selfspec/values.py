"""Check numbers and paths from callers. Commands use this too, so neither torch nor transformers is imported."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from reprlib import Repr
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from selfspec.errors import SelfSpecError, UnsupportedOptionError


def shown(value: object) -> str:
    """Return a value as a message shows it: as Python writes it, shortened where it is long."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"<integer of {value.bit_length()} bits>"
    writer = Repr()
    writer.maxstring = writer.maxother = 200
    return writer.repr(value)


def checked_path(name: str, value: object, error: type[SelfSpecError] = UnsupportedOptionError) -> Path:
    """Return an argument as a path; refuse what is neither a string nor a path."""
    if not isinstance(value, str | Path):
        raise error(f"{name} must be a path, as a string or a pathlib.Path; got {shown(value)}")
    return Path(value)


def is_whole(value: object) -> bool:
    """Return whether a value is an integer, but not a bool."""
    return type(value) is int


def is_finite(value: object) -> bool:
    """Return whether a value is a finite number, but not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Option:
    """Describes a field of settings, in its annotation; the command line makes an option of each such field.

    Attributes:
        help: says what the value does.
        min: the least value; `check_numbers` refuses smaller ones.
        max: the greatest value that the command line takes.
        metavar: what help calls the value; None: its type.
        parser: makes the value of text; None: its type does.
    """

    help: str
    min: float | None = None
    max: float | None = None
    metavar: str | None = None
    parser: Callable[[str], object] | None = None


def check_numbers(settings: Any, error: type[SelfSpecError]) -> None:
    """Refuse a dataclass with a field of type `int` or `float` that holds another type or is below its minimum.

    The minimum is the `min` in the field's annotation. None passes where the type allows it.
    """
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        kind, least = getattr(hint, "__origin__", hint), None
        for each in getattr(hint, "__metadata__", ()):
            least = getattr(each, "min", least)
        value, kinds = getattr(settings, name), get_args(kind) if isinstance(kind, UnionType) else (kind,)
        if value is None and NoneType in kinds:
            continue
        if (int in kinds and not is_whole(value)) or (float in kinds and not is_finite(value)):
            raise error(f"{name} must be {'an integer' if int in kinds else 'a finite number'}, got {shown(value)}")
        if least is not None and value < least:
            raise error(f"{name} must be at least {least:g}, got {shown(value)}")
