"""What a verification rule is: three pure functions of a draft, its q and the target's p."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Rule(Protocol):
    """How much of a draft stands, and what the token after it is drawn from.

    A rule throws one coin per draft token. `heads` says how each coin is loaded, `accepted` reads the coins, `next`
    says what the following token is drawn from. So the distribution of what a rule commits can be summed up exactly,
    over drafts and coins, with no sampling. Nothing here draws, and nothing waits for the device.

    Shapes: draft tokens `[batch, drafted]`; q `[batch, drafted, vocab]`, or None for a deterministic draft, whose q is
    one-hot at its tokens; p `[batch, drafted + 1, vocab]`, one distribution per draft token and one after the last;
    logits as p, the target's own before temperature and filters.

    Attributes:
        lossless: whether what is committed is distributed exactly as the target's own tokens.
        couples: whether draft and target choose their tokens with the noise of the place (see `coupling`).
    """

    @property
    def lossless(self) -> bool: ...

    @property
    def couples(self) -> bool: ...

    def heads(self, tokens: Tensor, q: Tensor | None, p: Tensor, logits: Tensor) -> Tensor:
        """Probability of heads for each coin, `[batch, drafted]`."""
        ...

    def accepted(self, coins: Tensor) -> Tensor:
        """Number of draft tokens that stand, `[batch]`, by the coins: `[batch, drafted]`, True for heads."""
        ...

    def next(self, tokens: Tensor, q: Tensor | None, p: Tensor, accepted: Tensor) -> Tensor:
        """Weights of the token after `accepted` draft tokens, `[batch, vocab]`, not normalised.

        The residual after a rejection, the target's own p (the bonus token's) after a draft that stands whole.
        """
        ...
