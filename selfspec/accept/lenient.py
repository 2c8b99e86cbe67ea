"""Lenient rejection sampling: token by token, with a bound on how much likelier any token may get."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from selfspec.accept.rule import rule
from selfspec.accept.token_level import TokenLevel
from selfspec.arguments import is_finite, shown
from selfspec.draft.draft import Draft
from selfspec.errors import UnsupportedOptionError


@rule(
    "relaxed-lenience",
    help="accepts with min(1, p / (l q)), so no token gets likelier than p / l; exact where decoding is greedy",
)
@dataclass(frozen=True)
class Lenience(TokenLevel):
    """Speculative sampling with lenience l (Leviathan et al., 2023, arXiv 2211.17192, appendix A.5).

    A draft token x is accepted with probability min(1, p(x) / (l q(x))); if it is rejected, the token is drawn from the
    residual max(p - q, 0). Given the text before it, x is committed with at most p(x) / l, also as one of several
    siblings, so a committed token's distribution is within total variation 1 - l of p. Greedy decoding stays exact.

    Attributes:
        lenience: l, above 0 and at most 1; 1 is `TokenLevel`.
    """

    lossless = False

    lenience: float = 0.5

    def __post_init__(self) -> None:
        if not is_finite(self.lenience) or not 0 < self.lenience <= 1:
            raise UnsupportedOptionError(f"lenience is above 0 and at most 1, got {shown(self.lenience)}")

    def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
        return (super().accept_probs(draft, p, logits) / self.lenience).clamp(max=1.0)
