"""Rules by name: those of this package, those that other packages declare, and `module:Class`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

from selfspec.accept.block import Block
from selfspec.accept.coupled import Coupled
from selfspec.accept.relaxed import TopKTolerance, Typical
from selfspec.accept.rule import Rule
from selfspec.accept.token_level import TokenLevel
from selfspec.arguments import ClassPath, check_kind
from selfspec.errors import UnsupportedOptionError

GROUP = "selfspec.rules"
"""The group of entry points in which other packages name their rules: `name = module:Class`."""


@cache
def rules() -> Mapping[str, Rule]:
    """Return every rule by name. The names of ours that are not lossless begin with `relaxed-`.

    Raises:
        UnsupportedOptionError: a package declares a name that is taken, or what it names is no rule.
    """
    found: dict[str, Rule] = {
        "token": TokenLevel(),
        "block": Block(),
        "coupled": Coupled(),
        "relaxed-typical": Typical(),
        "relaxed-top-k": TopKTolerance(),
    }
    for point in entry_points(group=GROUP):
        if point.name in found:
            raise UnsupportedOptionError(f"{point.value} declares the rule {point.name!r}, and there is one already")
        found[point.name] = _made(point.load(), point.value)
    return found


def default_rule(greedy: bool) -> Rule:
    """Return the rule of callers who name none: block verification where tokens are sampled.

    Under greedy decoding all lossless rules accept alike, and the token-level one has the least to compute.
    """
    return TokenLevel() if greedy else Block()


def find_rule(accept: str | Rule) -> Rule:
    """Return the rule of that name, or that `module:Class` names, or the rule itself.

    Raises:
        UnsupportedOptionError: there is none of that name, or it is no rule.
    """
    listed = ", ".join(rules())
    if not isinstance(accept, str):
        check_kind("accept", accept, Rule, f"choose one of {listed}")
        return accept
    if accept in rules():
        return rules()[accept]
    named = ClassPath.read(accept)
    if named is None or named.argument or accept.partition(":")[0] in rules():
        raise UnsupportedOptionError(f"no acceptance rule {accept!r}; choose one of {listed}, or module:Class")
    try:
        found = named.load()
    except (ModuleNotFoundError, AttributeError) as error:
        raise UnsupportedOptionError(f"no acceptance rule {accept!r}: {error}; choose one of {listed}") from error
    return _made(found, accept)


def rule_name(rule: Rule) -> str | None:
    """Return the name that `find_rule` reads; None: it has none."""
    known = next((name for name, each in rules().items() if each == rule), None)
    kind = type(rule)
    named = f"{kind.__module__}:{kind.__qualname__}"
    if known is not None or ClassPath.read(named) is None or kind.__module__ == "__main__":
        return known
    try:
        return named if kind() == rule else None
    except TypeError:
        return None


def _made(kind: object, named: str) -> Rule:
    try:
        made = kind() if isinstance(kind, type) else None
    except TypeError:
        made = None
    if isinstance(made, Rule):
        return made
    raise UnsupportedOptionError(f"{named} is no acceptance rule that is made without arguments; see selfspec.rules")
