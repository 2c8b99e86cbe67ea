"""JSON in files of any author, and in the descriptions of safetensors files: every fault is a typed error."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec.errors import SelfSpecError
from selfspec.files.writing import CHECKSUM, sealed, whole

_Content = TypeVar("_Content")
# Longer integers fit no float.
_MOST_DIGITS = 300
_LONG_INTEGER = re.compile(rf"\d{{{_MOST_DIGITS + 1},}}", re.ASCII)
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Check:
    """Limits the values of a field, as in `Annotated[int, Check(...)]`."""

    holds: Callable[[Any], bool]
    words: str


PositiveInt = Annotated[int, Check(lambda value: value > 0, "greater than 0")]
FiniteFloat = Annotated[float, Check(math.isfinite, "a finite number")]


def parse_json(text: str) -> Any:
    """Return the value that a JSON text holds. All its integers fit a float."""
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
    """Read a JSON file that holds a dataclass, each field in its declared type; other fields are left out."""
    try:
        return parsed(Path(file).read_bytes().decode(), kind)
    # ValueError: a name that no file can have, too.
    except (OSError, ValueError) as wrong:
        reason = getattr(wrong, "strerror", None) or wrong
        raise error(f"{file} cannot be read ({reason}); {remedy}") from wrong


def read_object(file: Path, error: type[SelfSpecError]) -> dict[str, Any]:
    """Read a JSON file of a checkpoint, which holds an object."""
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as wrong:
        raise error(f"{file} is not readable JSON ({wrong}); copy it from the original again") from wrong
    if not isinstance(content, dict):
        raise error(f"{file} does not hold a JSON object; copy it from the original again")
    return content


def parsed(text: str, kind: type[_Content]) -> _Content:
    """Return the dataclass that a JSON text holds, as `read_json` does."""
    content = parse_json(text)
    found: _Content = _fitted(content, kind, "")
    # Files that people write by hand have no checksum.
    if CHECKSUM in content and content != sealed(content):
        raise ValueError(f"its {CHECKSUM} does not fit: it is damaged, or was changed (then remove the {CHECKSUM})")
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
        if value is None and NoneType in arguments:
            return None
        *others, last = (each for each in arguments if each is not NoneType)
        for each in others:
            with suppress(ValueError):
                return _fitted(value, each, place)
        return _fitted(value, last, place)
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


@dataclass(frozen=True)
class Described(Generic[_Content]):
    """Holds tensors of a file by name, and what describes them."""

    about: _Content
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class _Written:
    """Holds the SHA-256 of each tensor by name, and the checksum of the description."""

    sha256: dict[str, str]
    checksum: str


def read_described(
    file: str | Path, key: str, kind: type[_Content], error: type[SelfSpecError], remedy: str
) -> Described[_Content]:
    """Read a file of `write_described`, whose description, under `key`, is of class `kind`.

    Raises:
        SelfSpecError: `error`, for a file that is missing, damaged or foreign; it names the `remedy`.
    """
    try:
        with cast(Any, safe_open(str(file), framework="pt")) as opened:
            said = (opened.metadata() or {}).get(key, "")
            about, written = parsed(said, kind), parsed(said, _Written).sha256
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    # ValueError: the description is missing or wrong.
    except (OSError, SafetensorError, ValueError) as wrong:
        reason = getattr(wrong, "strerror", None) or wrong
        raise error(f"{file} cannot be read ({reason}); {remedy}") from wrong
    found = {name: _digest(values) for name, values in tensors.items()}
    differing = sorted(name for name, _ in found.items() ^ written.items())
    if differing:
        raise error(f"{file} is damaged: {differing[0]} is not what was written; {remedy}")
    return Described(about, tensors)


def write_described(file: Path, key: str, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and their description, under `key` of the metadata: the whole file or none of it."""
    said = sealed({**about, "sha256": {name: _digest(values) for name, values in tensors.items()}})
    with whole(file) as draft:
        save_file(dict(tensors), draft, {key: json.dumps(said)})


def _digest(values: Tensor) -> str:
    found = hashlib.sha256(f"{str(values.dtype).removeprefix('torch.')} {tuple(values.shape)}\n".encode())
    found.update(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
