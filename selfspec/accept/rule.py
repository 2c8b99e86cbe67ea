"""What every verification rule takes and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """How much of a draft stands, and what the token after it is drawn from.

    Attributes:
        accepted: number of draft tokens that stand, `[batch]`.
        next: weights of the token that follows them, `[batch, vocab]`, not normalised: the residual after a
            rejection, the target's own p (the bonus token's) after a draft that stands whole.
    """

    accepted: Tensor
    next: Tensor


class Rule(Protocol):
    """A verification rule. Pure: the same arguments give the same verdict, and nothing waits for the device."""

    def __call__(self, tokens: Tensor, q: Tensor | None, p: Tensor, noise: Tensor) -> Verdict:
        """Judge a draft.

        Args:
            tokens: draft tokens, `[batch, drafted]`.
            q: the distribution each was drawn from, `[batch, drafted, vocab]`; None for a deterministic draft, whose
                q is one-hot at its tokens.
            p: the target's distributions, `[batch, drafted + 1, vocab]`: one per draft token and one after the last.
            noise: independent uniforms in [0, 1), `[batch, drafted]`.
        """
        ...
