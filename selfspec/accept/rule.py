"""The protocol of verification rules: three pure functions of a draft and the target's p."""

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
    """A rule's name, and whether the kernel for chains of `selfspec.kernels.triton_judge` implements the rule."""

    name: str
    by_kernel: bool


def rule(name: str, by_kernel: bool = False) -> Callable[[type[_Kind]], type[_Kind]]:
    """Declare the name of a rule; see `RuleDeclaration`. Subclasses declare their own."""

    def declared(kind: type[_Kind]) -> type[_Kind]:
        own: Any = kind
        own.declared = RuleDeclaration(name, by_kernel)
        return kind

    return declared


@runtime_checkable
class Rule(Protocol):
    """A verification rule: decides how much of a draft is accepted and how the next token is distributed.

    A rule gives each node of the draft a chance (`accept_probs`); the loop draws a mask by these chances; `accepted`
    reads the mask, and `recovery_probs` weights the token after the accepted nodes. So the distribution of the
    committed tokens can be computed exactly, as a sum over drafts and masks, without sampling. A rule draws nothing
    and does not wait for the device.

    Places: 0 is the last committed token, i + 1 is node i. The target gives p and logits at each place, for the token
    that follows: `[rows, nodes + 1, vocab]`; logits are the target's own, before temperature and filters. In a chain a
    place is also the number of draft tokens up to it.

    Attributes:
        lossless: whether the committed tokens are distributed exactly as the target's own tokens.
        couples: whether draft and target choose their tokens with the noise of the place (see `Noise.choose`).
    """

    @property
    def lossless(self) -> bool: ...

    @property
    def couples(self) -> bool: ...

    def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
        """Return each node's chance if its parent is accepted and its earlier siblings are not, `[rows, nodes]`."""
        ...

    def accepted(self, mask: Tensor, tree: Tree) -> Tensor:
        """Return the place of the deepest accepted node, `[rows]`; 0: no node is accepted.

        `mask` says whether the draw of each node fell within its chance, `[rows, nodes]`.
        """
        ...

    def recovery_probs(self, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
        """Return the weights of the token after the accepted nodes, `[rows, vocab]`, not normalised.

        They are p at the place less the share of its rejected children; at a leaf p itself, from which the bonus token
        is drawn. p is the target's, `[rows, nodes + 1, vocab]`; `place` is the deepest accepted node's, `[rows]`.
        """
        ...
