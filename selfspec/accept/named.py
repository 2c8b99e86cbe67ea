"""The rules by the names under which callers ask for them."""

from __future__ import annotations

from collections.abc import Mapping
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

    Raises:
        UnsupportedOptionError: there is none of that name, or it is no rule.
    """
    if not isinstance(accept, str):
        check_kind("accept", accept, Rule, f"choose one of {', '.join(RULES)}")
        return accept
    if accept not in RULES:
        raise UnsupportedOptionError(f"no acceptance rule {accept!r}; choose one of {', '.join(RULES)}")
    return RULES[accept]
