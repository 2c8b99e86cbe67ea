"""Seed-exact coupling: sampled tokens are, one for one, those that plain decoding gives with the same seed."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.accept.rule import rule
from selfspec.accept.token_level import TokenLevel


@rule("coupled", by_kernel=True)
@dataclass(frozen=True)
class Coupled(TokenLevel):
    """Draft and target choose the token of a place with the same noise; the draft is accepted where they choose alike.

    So the output does not depend on the draft at all: with equal seeds it equals plain decoding's, also under
    `accept="coupled"`, token for token where the arithmetic allows (float32, float64). The noise has decided when the
    rule comes to judge: p and q are one-hot, and the rule is the greedy case of token-level rejection sampling. It
    accepts less than the optimum, 1 - TV(p, q), but at least (1 - TV) / (1 + TV) (Daliri et al., 2024). Of a tree the
    child that is the noise's choice is accepted.
    """

    couples = True
