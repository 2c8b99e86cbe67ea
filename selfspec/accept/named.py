"""The rules by the names under which callers ask for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType

from selfspec.accept.block import Block
from selfspec.accept.coupled import Coupled
from selfspec.accept.relaxed import TopKTolerance, Typical
from selfspec.accept.rule import Rule
from selfspec.accept.token_level import TokenLevel
from selfspec.arguments import check_kind
from selfspec.errors import UnsupportedOptionError

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "token": TokenLevel(),
        "block": Block(),
        "coupled": Coupled(),
        "relaxed-typical": Typical(),
        "relaxed-top-k": TopKTolerance(),
    }
)
"""Every rule by name. The names of those that are not lossless begin with `relaxed-`."""


def default_rule(greedy: bool) -> Rule:
    """The rule of callers who name none: block verification where tokens are sampled.

    Under greedy decoding all lossless rules accept alike, and the token-level one has the least to compute.
    """
    return RULES["token" if greedy else "block"]


def find_rule(accept: str | Rule) -> Rule:
    """The rule of that name, or the rule itself.

    The thresholds of a relaxed rule may follow its name: `relaxed-typical:epsilon=0.1,delta=0.03`.

    Raises:
        UnsupportedOptionError: there is none of that name or with such thresholds, or it is no rule.
    """
    if not isinstance(accept, str):
        check_kind("accept", accept, Rule, f"choose one of {', '.join(RULES)}")
        return accept
    name, _, thresholds = accept.partition(":")
    if name not in RULES:
        raise UnsupportedOptionError(f"no acceptance rule {accept!r}; choose one of {', '.join(RULES)}")
    return _with_thresholds(name, thresholds) if thresholds else RULES[name]


def _with_thresholds(name: str, written: str) -> Rule:
    rule = RULES[name]
    known: dict[str, type] = (
        {field.name: type(getattr(rule, field.name)) for field in fields(rule)} if is_dataclass(rule) else {}
    )
    if not known:
        raise UnsupportedOptionError(f"rule {name!r} has no thresholds, got {written!r}; write {name!r} alone")
    given = {}
    for part in written.split(","):
        field, _, value = part.partition("=")
        try:
            # Python reads digits of any script, and grouped ones.
            if field in given or not value.isascii() or "_" in value:
                raise ValueError(value)
            given[field] = known[field](value)
        except (KeyError, ValueError):
            example = ",".join(f"{each}={getattr(rule, each)}" for each in known)
            raise UnsupportedOptionError(f"{part!r} is no threshold of {name!r}; write {name}:{example}") from None
        if not 0 <= given[field] < math.inf:
            raise UnsupportedOptionError(f"thresholds of {name!r} are at least 0 and finite, got {part!r}")
    changed: Rule = replace(rule, **given)  # type: ignore[type-var]
    return changed
