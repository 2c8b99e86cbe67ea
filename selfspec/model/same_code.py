"""Whether functions compute the same, by their code and not by their names."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any


def same_code(function: Any, other: Callable[..., Any]) -> bool:
    """Whether a function takes, looks up and does the same as another; both have docstrings, which do not count."""
    if not isinstance(function, FunctionType) or not isinstance(other, FunctionType):
        return False
    return _operations(function.__code__) == _operations(other.__code__)


def _operations(code: CodeType) -> tuple[object, ...]:
    # The first constant is the docstring.
    return code.co_code, code.co_names, code.co_consts[1:], code.co_argcount
