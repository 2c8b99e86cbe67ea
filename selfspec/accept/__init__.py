"""Verification rules: pure functions of draft tokens, q and p; no model, no cache, no draws."""

from selfspec.accept.block import Block
from selfspec.accept.coupled import Coupled
from selfspec.accept.named import RULES, default_rule, find_rule
from selfspec.accept.relaxed import TopKTolerance, Typical
from selfspec.accept.rule import Rule
from selfspec.accept.token_level import TokenLevel

__all__ = ["RULES", "Block", "Coupled", "Rule", "TokenLevel", "TopKTolerance", "Typical", "default_rule", "find_rule"]
