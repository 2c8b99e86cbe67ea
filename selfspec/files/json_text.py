"""Read JSON from any author; every fault in it is a typed error."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from selfspec.errors import SelfSpecError

_Content = TypeVar("_Content")
# Longer integers fit no float.
_MOST_DIGITS = 300
_LONG_INTEGER = re.compile(rf"\d{{{_MOST_DIGITS + 1},}}", re.ASCII)
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")
_CHECKSUM = "checksum"


@dataclass(frozen=True)
class Check:
    """Limits the values of a field, as in `Annotated[int, Check(...)]`."""

    holds: Callable[[Any], bool]
    words: str


PositiveInt = Annotated[int, Check(lambda value: value > 0, "greater than 0")]
FiniteFloat = Annotated[float, Check(math.isfinite, "a finite number")]


def parse_json(text: str) -> Any:
    """Return the value that a JSON text holds. All its integers fit a float.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or holds a number with too many digits or half a character.
    """
    try:
        value = json.loads(text)
        if _HALF_CHARACTER.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        digits = _LONG_INTEGER.search(text)
        if digits and _has_long_integer(value):
            raise ValueError(f"an integer of {len(digits[0])} digits")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _has_long_integer(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_long_integer, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) >= 10**_MOST_DIGITS


def read_json(file: str | Path, kind: type[_Content], error: type[SelfSpecError], remedy: str) -> _Content:
    """Read a JSON file that holds a dataclass. Fields that the dataclass lacks are left out.

    Each field must have the type it declares; values are not converted.

    Raises:
        SelfSpecError: of type `error`, if the file cannot be read, is not JSON, or does not fit the dataclass; the
            message names file, field and remedy.
    """
    try:
        return parsed(Path(file).read_bytes().decode(), kind)
    # ValueError: a name that no file can have, too.
    except (OSError, ValueError) as wrong:
        reason = getattr(wrong, "strerror", None) or wrong
        raise error(f"{file} cannot be read ({reason}); {remedy}") from wrong


def parsed(text: str, kind: type[_Content]) -> _Content:
    """Return the dataclass that a JSON text holds, as `read_json` does.

    Raises:
        ValueError: a field is wrong (the message names the first), or the checksum does not fit the text.
    """
    content = parse_json(text)
    found: _Content = _fitted(content, kind, "")
    # Files that people write by hand have no checksum.
    if _CHECKSUM in content and content != sealed(content):
        raise ValueError(f"its {_CHECKSUM} does not fit: it is damaged, or was changed (then remove the {_CHECKSUM})")
    return found


# How JSON has the types of fields, besides `None`, and the words for each.
_PLAIN: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "a boolean"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    str: ((str,), "a string"),
}


def _fitted(value: Any, kind: Any, place: str) -> Any:
    """Return a value of JSON as the type of its field; `place` is the path to the field."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if kind in _PLAIN:
        types, words = _PLAIN[kind]
        _check(isinstance(value, types) and isinstance(value, bool) == (kind is bool), words, place)
        return kind(value)
    if is_dataclass(kind):
        return _fitted_fields(value, kind, place)
    if origin is Annotated:
        found = _fitted(value, arguments[0], place)
        for limit in arguments[1:]:
            _check(limit.holds(found), limit.words, place)
        return found
    if origin is Literal:
        _check(value in arguments and type(value) in map(type, arguments), " or ".join(map(repr, arguments)), place)
        return value
    if origin in (Union, UnionType):
        (some,) = (each for each in arguments if each is not NoneType)
        return None if value is None else _fitted(value, some, place)
    if origin in (list, tuple):
        _check(isinstance(value, list), "an array", place)
        alike = origin is list or arguments[1:] == (...,)
        kinds = [arguments[0]] * len(value) if alike else list(arguments)
        _check(len(kinds) == len(value), f"an array of {len(kinds)} items", place)
        pairs = enumerate(zip(value, kinds, strict=True))
        return origin(_fitted(each, inner, _below(place, number)) for number, (each, inner) in pairs)
    _check(isinstance(value, dict), "an object", place)
    return {name: _fitted(each, arguments[1], _below(place, name)) for name, each in value.items()}


def _fitted_fields(value: Any, kind: Any, place: str) -> Any:
    _check(isinstance(value, dict), "an object", place)
    kinds, found = get_type_hints(kind, include_extras=True), {}
    for each in fields(kind):
        if each.name in value:
            found[each.name] = _fitted(value[each.name], kinds[each.name], _below(place, each.name))
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{_below(place, each.name)}: Field required")
    try:
        return kind(**found)
    except ValueError as wrong:
        raise ValueError(f"{place}: {wrong}" if place else str(wrong)) from wrong


def _below(place: str, name: object) -> str:
    return f"{place}.{name}" if place else str(name)


def _check(holds: bool, words: str, place: str) -> None:
    if not holds:
        raise ValueError(f"{place}: Input should be {words}" if place else f"Input should be {words}")


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a JSON file with a checksum, by which `parsed` detects changes.

    Raises:
        ValueError: it holds NaN or an infinite number, which JSON lacks.
    """
    kept = {name: value for name, value in content.items() if name != _CHECKSUM}
    # Take the content as it will be read: JSON has other types than Python.
    read = json.loads(json.dumps(kept, allow_nan=False))
    text = json.dumps(read, sort_keys=True)
    return {**read, _CHECKSUM: hashlib.sha256(text.encode()).hexdigest()}
