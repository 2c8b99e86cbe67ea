"""Find rules by name: rules of this package, rules that other packages declare, and `module:Class`.

A `:` after the name sets fields of the rule: `relaxed-top-k:top_k=5,tolerance=2`.
"""

from __future__ import annotations

import pkgutil
from ast import literal_eval
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from selfspec.accept.block import Block
from selfspec.accept.rule import Rule
from selfspec.accept.token_level import TokenLevel
from selfspec.arguments import ClassPath, check_kind
from selfspec.errors import UnsupportedOptionError

GROUP = "selfspec.rules"
"""The group of entry points in which other packages name their rules: `name = module:Class`."""


@cache
def rules() -> Mapping[str, Rule]:
    """Return every rule by name, lossless rules first. Names of our rules that are not lossless begin with `relaxed-`.

    Raises:
        UnsupportedOptionError: a package declares a name that is taken, or names something that is no rule.
    """
    found: dict[str, Rule] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)], "selfspec.accept."):
        for kind in vars(import_module(module.name)).values():
            if isinstance(kind, type) and "declared" in vars(kind):
                found[vars(kind)["declared"].name] = _made(kind, kind.__name__)
    found = dict(sorted(found.items(), key=lambda each: not each[1].lossless))
    for point in entry_points(group=GROUP):
        if point.name in found:
            raise UnsupportedOptionError(f"{point.value} declares the rule {point.name!r}, and there is one already")
        found[point.name] = _made(point.load(), point.value)
    return found


def default_rule(greedy: bool) -> Rule:
    """Return the rule for callers who name none: block verification where tokens are sampled.

    Under greedy decoding all lossless rules accept alike, and the token-level one has the least to compute.
    """
    return TokenLevel() if greedy else Block()


def find_rule(accept: str | Rule) -> Rule:
    """Return the rule with a name or a `module:Class`; a rule is returned as it is.

    Raises:
        UnsupportedOptionError: no rule has that name, the class is no rule, or it has no such fields.
    """
    listed = ", ".join(rules())
    if not isinstance(accept, str):
        check_kind("accept", accept, Rule, f"choose one of {listed}")
        return accept
    name, _, argument = accept.partition(":")
    if name in rules():
        return _made(type(rules()[name]), name, argument) if argument else rules()[name]
    named = ClassPath.read(accept)
    if named is None:
        raise UnsupportedOptionError(f"no acceptance rule {accept!r}; choose one of {listed}, or module:Class")
    try:
        found = named.load()
    except (ModuleNotFoundError, AttributeError) as error:
        raise UnsupportedOptionError(f"no acceptance rule {accept!r}: {error}; choose one of {listed}") from error
    return _made(found, f"{named.module}:{named.name}", named.argument or "")


def rule_name(rule: Rule) -> str | None:
    """Return the name by which `find_rule` finds a rule; None: it has none."""
    kind: Any = type(rule)
    if kind.__module__ == "__main__":
        return None
    name = next(
        (name for name, each in rules().items() if type(each) is kind), f"{kind.__module__}:{kind.__qualname__}"
    )
    try:
        changed = [f"{each.name}={getattr(rule, each.name)!r}" for each in fields(kind) if each.init]
        for found in (name, f"{name}:{','.join(changed)}"):
            if find_rule(found) == rule:
                return found
    except (TypeError, UnsupportedOptionError):
        pass
    return None


def _made(kind: object, named: str, argument: str = "") -> Rule:
    """Make a rule of a class, with fields as `name=number`, joined by commas."""
    try:
        pairs = (each.partition("=") for each in argument.split(",") if argument)
        made = (
            kind(**{name.strip(): literal_eval(value.strip()) for name, _, value in pairs})
            if isinstance(kind, type)
            else None
        )
    except UnsupportedOptionError:
        raise
    except (TypeError, ValueError, SyntaxError):
        made = None
    if isinstance(made, Rule):
        return made
    if argument:
        raise UnsupportedOptionError(
            f"the acceptance rule {named} takes no {argument!r}; write e.g. {named}:name=2,other=0.5"
        )
    raise UnsupportedOptionError(f"{named} is no acceptance rule that is made without arguments; see selfspec.rules")
