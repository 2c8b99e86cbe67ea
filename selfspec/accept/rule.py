"""What a verification rule is: three pure functions of a draft and the target's p."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from selfspec.cache.tree import Tree
from selfspec.draft.draft import Draft

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class RuleDeclaration:
    """How a rule is called, and whether the kernel for chains of `selfspec.kernels.triton_judge` judges as it does."""

    name: str
    by_kernel: bool


def rule(name: str, by_kernel: bool = False) -> Callable[[type[_Kind]], type[_Kind]]:
    """Declare the name of a rule; see `RuleDeclaration`. A class that inherits from it declares its own."""

    def declared(kind: type[_Kind]) -> type[_Kind]:
        own: Any = kind
        own.declared = RuleDeclaration(name, by_kernel)
        return kind

    return declared


@runtime_checkable
class Rule(Protocol):
    """How much of a draft is accepted, and what the token after it is drawn from.

    A rule gives each node of the draft a chance (`accept_probs`); the loop draws a mask by these chances; `accepted`
    reads the mask, and `recovery_probs` says what the token after the accepted nodes is drawn from. So the distribution
    of what a rule commits can be summed up exactly, over drafts and masks, with no sampling. Nothing here draws, and
    nothing waits for the device.

    Places: 0 is the last committed token, i + 1 is node i. The target gives p and logits at each of them, for the token
    that follows: `[rows, nodes + 1, vocab]`; logits are its own, before temperature and filters. In a chain a place is
    also the number of draft tokens up to there.

    Attributes:
        lossless: whether what is committed is distributed exactly as the target's own tokens.
        couples: whether draft and target choose their tokens with the noise of the place (see `Noise.choose`).
    """

    @property
    def lossless(self) -> bool: ...

    @property
    def couples(self) -> bool: ...

    def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
        """Chance of each node, given that its parent is accepted and its earlier siblings are not, `[rows, nodes]`."""
        ...

    def accepted(self, mask: Tensor, tree: Tree) -> Tensor:
        """Place of the deepest accepted node, `[rows]`; 0: no node is.

        `mask` says whether the draw of each node fell within its chance, `[rows, nodes]`.
        """
        ...

    def recovery_probs(self, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
        """Weights of the token after the accepted nodes, `[rows, vocab]`, not normalised.

        p there, less what its rejected children took; at a leaf p itself, from which the bonus token is drawn. p is the
        target's, `[rows, nodes + 1, vocab]`, and the place that of the deepest accepted node, `[rows]`.
        """
        ...
