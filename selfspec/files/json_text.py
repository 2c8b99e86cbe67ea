"""Read JSON from any author; every fault in it is a typed error."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from selfspec.errors import SelfSpecError

_Content = TypeVar("_Content")
# Longer integers fit no float.
_MOST_DIGITS = 300
_LONG_INTEGER = re.compile(rf"\d{{{_MOST_DIGITS + 1},}}", re.ASCII)
_CHECKSUM = "checksum"


def parse_json(text: str) -> Any:
    """Return the value that a JSON text holds. All its integers fit a float.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or holds a number with too many digits or half a character.
    """
    value = from_json(text)
    digits = _LONG_INTEGER.search(text)
    if digits and _has_long_integer(value):
        raise ValueError(f"an integer of {len(digits[0])} digits")
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
        return parsed(Path(file).read_bytes(), kind)
    # ValueError: a name that no file can have, too.
    except (OSError, ValueError) as wrong:
        reason = getattr(wrong, "strerror", None) or wrong
        raise error(f"{file} cannot be read ({reason}); {remedy}") from wrong


def parsed(text: str | bytes, kind: type[_Content]) -> _Content:
    """Return the dataclass that a JSON text holds, as `read_json` does.

    Raises:
        ValueError: a field is wrong (the message names the first), or the checksum does not fit the text.
    """
    try:
        found = TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as wrong:
        raise ValueError(first_error(wrong)) from None
    content = json.loads(text)
    # Files that people write by hand have no checksum.
    if isinstance(content, dict) and _CHECKSUM in content and content != sealed(content):
        raise ValueError(f"its {_CHECKSUM} does not fit: it is damaged, or was changed (then remove the {_CHECKSUM})")
    return found


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


def first_error(wrong: ValidationError) -> str:
    """Say in one line which field is the first wrong one, and why."""
    first = wrong.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return ": ".join(filter(None, [place, first["msg"].removeprefix("Value error, ")]))
