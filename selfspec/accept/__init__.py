"""Verification rules: pure functions of draft tokens, q and p; no model, no cache, no draws."""

from selfspec.accept.block import Block
from selfspec.accept.registry import default_rule, find_rule, rule_name, rules
from selfspec.accept.relaxed import TopKTolerance, Typical
from selfspec.accept.rule import Rule
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
]
