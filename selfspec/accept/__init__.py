"""Verification rules: pure functions of the draft tokens, the draft's q, the target's p and uniform noise."""

from selfspec.accept.rule import Rule, Verdict
from selfspec.accept.token_level import token_level

__all__ = ["Rule", "Verdict", "token_level"]
