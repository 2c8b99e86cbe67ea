"""Verification rules: pure functions of draft tokens, q and p; no model, no cache, no draws."""

from selfspec.accept.block import Block
from selfspec.accept.relaxed import TopKTolerance, Typical
from selfspec.accept.rule import Rule, declaration_of, find_rule, rule_name, rules, with_fields
from selfspec.accept.token_level import Coupled, TokenLevel

__all__ = [
    "Block",
    "Coupled",
    "Rule",
    "TokenLevel",
    "TopKTolerance",
    "Typical",
    "declaration_of",
    "default_rule",
    "find_rule",
    "rule_name",
    "rules",
    "with_fields",
]


def default_rule(greedy: bool) -> Rule:
    """Return the rule for callers who name none: block verification where tokens are sampled.

    Under greedy decoding all lossless rules accept alike, and the token-level one has the least to compute.
    """
    return TokenLevel() if greedy else Block()
