"""Verification rules: pure functions of draft tokens, q and p, which run no model and draw nothing."""

from selfspec.accept.block import Block
from selfspec.accept.relaxed import TopKTolerance, Typical
from selfspec.accept.rule import Rule, find_rule, rule_name, rules, with_fields
from selfspec.accept.token_level import Coupled, TokenLevel

__all__ = [
    "Block",
    "Coupled",
    "Rule",
    "TokenLevel",
    "TopKTolerance",
    "Typical",
    "default_rule",
    "find_rule",
    "rule_name",
    "rules",
    "with_fields",
]


def default_rule(greedy: bool) -> Rule:
    """Return `Block` for sampling, and the cheaper `TokenLevel` where greedy: all lossless rules then accept alike."""
    return TokenLevel() if greedy else Block()
