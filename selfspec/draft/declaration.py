"""Declarations of drafters, which all code that lists, parses or explains drafts reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar

GROUP = "selfspec.drafts"
"""The group of entry points in which other packages name their drafters."""

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Declaration:
    """Says how a drafter is written, and what it does.

    Attributes:
        argument: the text after the name, such as `:FILE`; optional parts are in brackets.
        help: one line that says what the drafter does.
        example: the name with an argument that makes sense.
        written: by itself, behind another draft and a `+`, or before drafts that it joins.
    """

    name: str
    argument: str
    help: str
    example: str
    written: Literal["alone", "behind", "before"]

    @property
    def form(self) -> str:
        """Its grammar, such as `exit:E`."""
        return ("draft+" if self.written == "behind" else "") + self.name + self.argument


def drafter(
    name: str,
    *,
    help: str,
    argument: str = "",
    example: str = "",
    written: Literal["alone", "behind", "before"] = "alone",
) -> Callable[[type[_Kind]], type[_Kind]]:
    """Declare a drafter's name; see `Declaration`. May be given twice, for a class with two names.

    In a package of your own, name the class in the entry point group `selfspec.drafts` as well.
    """

    def declared(kind: type[_Kind]) -> type[_Kind]:
        own: Any = kind
        usual = name if argument.startswith("[") else name + argument
        found = Declaration(name, argument, help, example or usual, written)
        own.declared = (found, *vars(kind).get("declared", ()))
        return kind

    return declared


def name_of(kind: type[object]) -> str:
    """Return the name that a class of drafters declares, if it is known by this name; else `module:Class`."""
    declared: tuple[Declaration, ...] = vars(kind).get("declared", ())
    whole = f"{kind.__module__}:{kind.__qualname__}"
    return declared[0].name if declared and (kind.__module__.startswith("selfspec.") or whole in named()) else whole


@cache
def named() -> frozenset[str]:
    """Return the drafters that other packages name in an entry point, as `module:Class`."""
    return frozenset(point.value for point in entry_points(group=GROUP))


def read_number(text: str | None) -> int:
    """Read the number of a layer, or of tokens.

    Raises:
        ValueError: the text is no number of at most nine digits; no layer or token has a larger number.
    """
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(text)
    return int(text)
