"""Verification rules: pure functions of draft tokens, q and p; no model, no cache, no draws."""

from selfspec.accept.rule import Rule
from selfspec.accept.token_level import TokenLevel

__all__ = ["Rule", "TokenLevel"]
