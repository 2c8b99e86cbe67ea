"""Read and write sizes in bytes in the form that people use."""

from __future__ import annotations

import math
import re

from selfspec.arguments import shown
from selfspec.errors import UnsupportedOptionError

_UNITS = {unit: 1024**power for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))} | {
    unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB"), 1)
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", re.ASCII)


def parse_bytes(name: str, size: str | int) -> int:
    """Return a size in bytes: "6GiB", "500 MB" or a number of bytes.

    Raises:
        UnsupportedOptionError: it is not a size, has no unit, or is less than a byte; the message names the argument.
    """
    if type(size) is int and size > 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    unit = None if match is None else {each.lower(): each for each in _UNITS}.get(match[2].lower())
    if match is None or unit is None or not 1 <= float(match[1]) * _UNITS[unit] < math.inf:
        raise UnsupportedOptionError(f"{name}={shown(size)} is no size; write a number and a unit, such as '6GiB'")
    return int(float(match[1]) * _UNITS[unit])


def shown_bytes(size: float) -> str:
    """Write a size for people: "1.50 GiB"."""
    for unit in ("TiB", "GiB", "MiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.2f} {unit}"
    return f"{size / _UNITS['KiB']:.1f} KiB"
