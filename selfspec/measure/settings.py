"""Check settings of tools, whose fields are annotated as options of the command line.

It imports no torch, so that commands can show their help without it.
"""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from selfspec.arguments import is_finite, is_whole, shown
from selfspec.errors import SelfSpecError


def check_numbers(settings: Any, error: type[SelfSpecError]) -> None:
    """Refuse a dataclass with an `int` or `float` field of another type, or below the `min` in its annotation.

    None passes where the type allows it.
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
