"""A draft: what a drafter proposes for the target to judge, and the most that it may take."""

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
    """The most that a draft may take.

    Attributes:
        depth: draft tokens on one path; 0: no draft.
        nodes: draft tokens in all, siblings included, at least `depth`.
        rows: numbers of the rows that the draft is for, where others have one already; None: all.
    """

    depth: int
    nodes: int
    rows: frozenset[int] | None = None

    @classmethod
    def chain(cls, length: int) -> Budget:
        """The budget of a draft without branches."""
        return cls(length, length)

    def within(self, tokens: int) -> Budget:
        """The budget of a draft of which a row can commit at most `tokens`: every level that is cut has a node."""
        if self.depth <= tokens:
            return self
        left = (tokens, self.nodes - (self.depth - tokens)) if tokens > 0 else (0, 0)
        return Budget(*left, self.rows)


@dataclass(frozen=True)
class Resume:
    """What of a draft's work the target need not do again.

    The shared cache holds exact keys and values of all sublayers before `start`, for every token the draft ran.

    Attributes:
        start: the first sublayer whose work is not exact; verification resumes there.
        states: what enters it, for each token the draft ran, `[batch, read, hidden]`: the last committed token and the
            first nodes of the tree. Of a chain all but the last, which no draft step has read.
    """

    start: Sublayer
    states: ExactStates

    @property
    def read(self) -> int:
        """How many tokens the draft ran, the last committed one included."""
        return self.states.hidden.shape[-2]


@dataclass(frozen=True)
class Draft:
    """Tokens proposed for the target to judge: a tree of them, the same shape in all rows.

    Siblings may be drawn in any way, with replacement or without, as long as `probs` says what each was really drawn
    from, given all nodes before it. A node that was drawn must not be left out for its score: that biases the output.

    Attributes:
        tokens: of each node, `[rows, nodes]`.
        tree: which node follows which.
        probs: the distribution q that each token was drawn from, `[rows, nodes, vocab]`: drawn without replacement, the
            later of two siblings has 0 at the earlier one's token, and the rest normalised. None where nothing was
            drawn (q is one-hot at the tokens), as in greedy drafts, the likeliest tokens of a place, and look-ups.
        resume: what verification may build on; None where it starts from tokens.
        steps: draft steps it took.
        match_length: of a look-up, how many tokens back from its end the text is alike where the draft was found;
            else 0.
        row_lengths: how many of its tokens are meant for each row; the others only fill it up. None: all of them.
        behind: nodes that the pass which verifies reads behind its own; None: there are none.

    Raises:
        ValueError: `tokens` has another number of nodes than `tree`.
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
        """A draft in which each token follows the one before it, `[rows, drafted]`."""
        return cls(tokens, Tree.chain(tokens.shape[1]), probs, resume, steps, match_length, row_lengths)

    def of_rows(self, rows: Sequence[int]) -> Draft:
        """Return the draft of some rows, to judge it: without `resume` and `behind`."""
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
        """All that the target pass reads behind the last committed token."""
        return self.tree if self.behind is None else self.behind.tree(self.tree)

    @property
    def behind_any_tree(self) -> Behind | None:
        """What may still be read behind it when other nodes have joined its tree."""
        return self.behind if self.behind is not None and self.behind.any_tree else None

    @property
    def length(self) -> int:
        """Draft length: the most tokens that a row can accept, the depth of the tree."""
        return self.tree.depth
