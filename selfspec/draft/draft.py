"""A draft: what a drafter proposes for the target to judge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import Sublayer

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Resume:
    """What of a draft's work the target need not do again.

    The shared cache holds exact keys and values of all sublayers before `start`, for every token the draft ran.

    Attributes:
        start: the first sublayer whose work is not exact; verification goes on there.
        states: what enters it, for each token the draft ran, `[batch, drafted, hidden]`: the last committed token and
            all draft tokens but the last, which no draft step has read.
    """

    start: Sublayer
    states: ExactStates


@dataclass(frozen=True)
class Draft:
    """Tokens proposed for the target to judge.

    Attributes:
        tokens: `[batch, drafted]`.
        q: the distribution each token was drawn from, `[batch, drafted, vocab]`; None where the draft is
            deterministic (q is one-hot at its tokens), as greedy drafts and look-ups are.
        resume: what verification may build on; None where it starts from tokens.
        steps: draft steps it took.
        match: of a look-up, how many tokens back from its end the text is alike where the draft was found; else 0.
    """

    tokens: Tensor
    q: Tensor | None = None
    resume: Resume | None = None
    steps: int = 0
    match: int = 0

    @property
    def length(self) -> int:
        """Draft length: tokens drafted for each row."""
        return self.tokens.shape[1]
