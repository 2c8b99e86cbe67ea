"""The Python code that a model's modules can reach: functions, and the names that they look up."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn
from transformers.utils.generic import GeneralInterface

# Modules and functions of these are known to decide alike in every call.
_KNOWN = ("torch.", "numpy.", "transformers.", "selfspec.")
# Follow only these of torch: its other functions call kernels.
_LOOKED_INTO = ("torch.nn.", "transformers.")
# The kernels of attention that selfspec runs, and of masks for them.
_KERNELS = {"sdpa", "eager"}


class ReachedCode:
    """The code that can be reached from the `forward` of some modules, found without running it.

    Names are followed wherever code mentions them: in its module, in modules found there, and among the methods of its
    class. So it may name more than a pass runs, but misses nothing that is called by name.

    Attributes:
        names: by id of a namespace: the namespace, and the names looked up in it.
        mappings: kernels by name, from which a configuration chooses.
        others: names of functions from outside Python, `torch`, NumPy and `transformers`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self.mappings: list[dict[Any, Any]] = []
        self.others: list[str] = []
        self._seen: set[object] = set()
        self._left: list[tuple[FunctionType, type | None]] = []
        for module in model.modules():
            kind = type(module)
            self._add(kind.__call__, kind)
            self._add(kind.forward, kind)
            for value in list(vars(module).values()):
                if callable(value) and not isinstance(value, type):
                    self._add(value, kind)
        while self._left:
            self._follow(*self._left.pop())

    def _add(self, value: Any, kind: type | None) -> None:
        """Queue a callable to be followed."""
        while isinstance(value, (MethodType, partial)):
            value = value.__func__ if isinstance(value, MethodType) else value.func
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        home = _home(value)
        if not _is_known(home):
            self.others.append(f"{home}.{getattr(value, '__qualname__', type(value).__qualname__)}")
            return
        looked_into = isinstance(value, FunctionType) and f"{home}.".startswith(_LOOKED_INTO)
        # The names that a method finds depend on the class it is called on.
        if looked_into and (value, kind) not in self._seen:
            self._seen.add((value, kind))
            self._left.append((value, kind))

    def _follow(self, function: FunctionType, kind: type | None) -> None:
        mentioned = {name for code in _codes(function.__code__) for name in code.co_names}
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # Not filled yet.
                self._found(cell.cell_contents, kind)
        spaces = [function.__globals__]
        for space in spaces:
            for name in mentioned & space.keys():
                value = space[name]
                self.names.setdefault(id(space), (space, set()))[1].add(name)
                if isinstance(value, ModuleType):
                    inner = vars(value)
                    if not any(inner is known for known in spaces):
                        spaces.append(inner)
                else:
                    self._found(value, None)
        for base in kind.__mro__ if kind else ():
            for name in mentioned & vars(base).keys():
                self._found(vars(base)[name], kind)

    def _found(self, value: Any, kind: type | None) -> None:
        if isinstance(value, GeneralInterface):
            mappings = (vars(value)["_local_mapping"], type(value)._global_mapping)
            for mapping in mappings:
                if not any(mapping is known for known in self.mappings):
                    self.mappings.append(mapping)
            for name in _KERNELS & set(value):
                self._add(value[name], None)
        elif isinstance(value, (FunctionType, MethodType, partial, property, staticmethod, classmethod)):
            self._add(value, kind)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _home(value: Any) -> str:
    """The module that a callable comes from."""
    if isinstance(value, FunctionType):
        # A wrapper reports the module of what it wraps.
        home = value.__globals__.get("__name__")
    else:
        home = getattr(value, "__module__", None) or type(value).__module__
    return str(home)


def _is_known(home: str) -> bool:
    return f"{home}.".startswith(_KNOWN) or home.split(".")[0] in sys.stdlib_module_names
