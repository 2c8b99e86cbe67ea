"""Drafts, which a drafter proposes for the target to judge, and the budgets that limit their size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from selfspec.cache.tree import Tree
from selfspec.device import to_device
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import Sublayer
from selfspec.runtime.runner import Behind


@dataclass(frozen=True)
class Budget:
    """Limits the size of a draft.

    Attributes:
        depth: most draft tokens on one path; 0: no draft.
        nodes: most draft tokens in all, siblings included; at least `depth`.
        rows: numbers of the rows to draft for, where the other rows have a draft already; None: all rows.
    """

    depth: int
    nodes: int
    rows: frozenset[int] | None = None

    @classmethod
    def chain(cls, length: int) -> Budget:
        """Return the budget of a draft of `length` tokens without branches."""
        return cls(length, length)

    def within(self, tokens: int) -> Budget:
        """Return this budget cut to a depth of `tokens`; each level that is cut takes one node away."""
        if self.depth <= tokens:
            return self
        left = (tokens, self.nodes - (self.depth - tokens)) if tokens > 0 else (0, 0)
        return Budget(*left, self.rows)


@dataclass(frozen=True)
class Resume:
    """Holds the exact part of a draft's work, which the target need not repeat.

    The shared cache holds exact keys and values of all sublayers before `start`, for every token the draft ran.

    Attributes:
        start: the first sublayer whose work is not exact; verification resumes there.
        states: inputs of that sublayer for each token the draft ran, `[batch, read, hidden]`: the last committed token
            and the first nodes of the tree. The last token of a chain is missing: no draft step has read it.
    """

    start: Sublayer
    states: ExactStates

    @property
    def read(self) -> int:
        """Number of tokens that the draft ran, the last committed one included."""
        return self.states.hidden.shape[-2]


@dataclass(frozen=True)
class Draft:
    """Holds the tokens proposed for the target to judge: a tree of the same shape in all rows.

    Siblings may be drawn with or without replacement, as long as `probs` gives the distribution that each was drawn
    from, given all nodes before it. Leaving out a drawn node because of its score would bias the output.

    Attributes:
        tokens: token of each node, `[rows, nodes]`.
        tree: the shape, which gives each node its parent.
        probs: the distribution q that each token was drawn from, `[rows, nodes, vocab]`. Drawn without replacement, q
            of the later of two siblings is 0 at the earlier one's token, and normalised. None where nothing was drawn
            (q is one-hot at the tokens), as in greedy drafts, the likeliest tokens of a place, and look-ups.
        resume: the work that verification may build on; None: it starts from tokens.
        steps: number of draft steps.
        match_length: for a look-up, how many tokens at the end of the text match the place it copies from; else 0.
        row_lengths: number of draft tokens meant for each row; the rest is filler. None: all of them.
        behind: further nodes that the verification pass reads behind the draft; None: no such nodes.

    Raises:
        ValueError: `tokens` and `tree` differ in their number of nodes.
    """

    tokens: Tensor
    tree: Tree
    probs: Tensor | None = None
    resume: Resume | None = None
    steps: int = 0
    match_length: int = 0
    row_lengths: tuple[int, ...] | None = None
    behind: Behind | None = None

    def __post_init__(self) -> None:
        if self.tokens.shape[1] != len(self.tree):
            raise ValueError(f"a draft of {self.tokens.shape[1]} tokens a row has a tree of {len(self.tree)} nodes")

    @classmethod
    def chain(
        cls,
        tokens: Tensor,
        probs: Tensor | None = None,
        resume: Resume | None = None,
        steps: int = 0,
        match_length: int = 0,
        row_lengths: tuple[int, ...] | None = None,
    ) -> Draft:
        """Make a draft in which each token follows the one before it; `tokens` is `[rows, drafted]`."""
        return cls(tokens, Tree.chain(tokens.shape[1]), probs, resume, steps, match_length, row_lengths)

    def of_rows(self, rows: Sequence[int]) -> Draft:
        """Return the part of the draft for some rows, without `resume` and `behind`; the verdict needs neither."""
        chosen = to_device(rows, self.tokens.device)
        return replace(
            self,
            tokens=self.tokens[chosen],
            probs=None if self.probs is None else self.probs[chosen],
            resume=None,
            behind=None,
            row_lengths=None if self.row_lengths is None else tuple(self.row_lengths[row] for row in rows),
        )

    @property
    def block(self) -> Tree:
        """Tree of all nodes that the target pass reads behind the last committed token."""
        return self.tree if self.behind is None else self.behind.tree(self.tree)

    @property
    def behind_any_tree(self) -> Behind | None:
        """`behind`, if it can still be read after other nodes have joined the tree; else None."""
        return self.behind if self.behind is not None and self.behind.any_tree else None

    @property
    def length(self) -> int:
        """Draft length: the most tokens that a row can accept, the depth of the tree."""
        return self.tree.depth
