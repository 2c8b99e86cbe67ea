"""Drafts, their budgets, and the target's verdicts on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from selfspec.cache.tree import Tree
from selfspec.device import to_device
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import Sublayer


@dataclass(frozen=True)
class Budget:
    """Limits the size of a draft."""

    depth: int  # most draft tokens on one path; 0: no draft
    nodes: int  # most draft tokens in all, siblings included; at least `depth`

    @classmethod
    def chain(cls, length: int) -> Budget:
        """Return the budget of a draft of `length` tokens without branches."""
        return cls(length, length)

    def within(self, tokens: int) -> Budget:
        """Return this budget cut to a depth of `tokens`; each level cut takes one node away."""
        if self.depth <= tokens:
            return self
        return Budget(tokens, self.nodes - (self.depth - tokens)) if tokens > 0 else Budget(0, 0)


@dataclass(frozen=True)
class Draft:
    """Holds the tokens proposed for the target to judge: a tree of the same shape in all rows.

    Siblings may be drawn with or without replacement, if `probs` gives the distribution of each, given all nodes before
    it. Dropping a drawn node because of its score biases the output.

    Attributes:
        tokens: token of each node, `[rows, nodes]`.
        tree: the shape.
        probs: draft q of each token, `[rows, nodes, vocab]`. Without replacement, q of a later sibling is 0 at the
            earlier one's token, and normalised. None: nothing was drawn and q is one-hot, as in greedy drafts,
            likeliest tokens and look-ups.
        resume: exact work that verification builds on; None: verification starts from tokens.
        steps: number of draft steps.
        match_length: for a look-up, number of tokens at the text's end that match the place copied from; else 0.

    Raises:
        ValueError: `tokens` and `tree` differ in their number of nodes.
    """

    tokens: Tensor
    tree: Tree
    probs: Tensor | None = None
    resume: Resume | None = None
    steps: int = 0
    match_length: int = 0

    def __post_init__(self) -> None:
        if self.tokens.shape[1] != len(self.tree):
            raise ValueError(f"a draft of {self.tokens.shape[1]} tokens a row has a tree of {len(self.tree)} nodes")

    @classmethod
    def chain(cls, tokens: Tensor, probs: Tensor | None = None, steps: int = 0, match_length: int = 0) -> Draft:
        """Make a draft without branches from `tokens`, `[rows, drafted]`."""
        return cls(tokens, Tree.chain(tokens.shape[1]), probs, None, steps, match_length)

    def of_rows(self, rows: Sequence[int]) -> Draft:
        """Return the draft of some rows, without `resume`, which the verdict does not need."""
        chosen = to_device(rows, self.tokens.device)
        return replace(
            self,
            tokens=self.tokens[chosen],
            probs=None if self.probs is None else self.probs[chosen],
            resume=None,
        )

    @property
    def length(self) -> int:
        """Draft length: the depth of the tree, the most tokens that a row can accept."""
        return self.tree.depth


@dataclass(frozen=True)
class Resume:
    """Holds the exact part of a draft's work, which the target does not repeat.

    The shared cache holds exact keys and values of all sublayers before `start`, for every token the draft ran.
    """

    start: Sublayer  # the first sublayer that is not exact; verification resumes there
    # Inputs of that sublayer, `[batch, read, hidden]`, for the last committed token and the first nodes of the tree.
    # The last token of a chain is missing: no draft step reads it.
    states: ExactStates

    @property
    def read(self) -> int:
        """Number of tokens that the draft ran, the last committed one included."""
        return self.states.hidden.shape[-2]


@dataclass(frozen=True)
class Verdict:
    """Holds the verdict of one round.

    Attributes:
        running: numbers of the rows, in the order of tensors.
        rows: the verdict on each unfinished row, by its number.
        last_tokens: last token of each running row after the round, `[rows, 1]`; arbitrary for finished rows.
    """

    running: Sequence[int]
    rows: Mapping[int, RowVerdict]
    last_tokens: Tensor


@dataclass(frozen=True)
class RowVerdict:
    """Holds the verdict on one unfinished row.

    A run is the accepted draft tokens and the target's token after them, up to the row's end. Lockstep may drop the
    last tokens of a run.

    Attributes:
        drafted: draft token of each node.
        path: accepted nodes, in order.
        judged: number of places judged: those of the accepted nodes, and one where the rule rejected all children.
        tokens: committed part of the run.
        dropped: number of tokens of the run that lockstep dropped.
        ended: True if the row ends with `tokens`.
        finite: True if the target's logits after the accepted tokens are finite; else the run has no token there.
    """

    drafted: Sequence[int]
    path: Sequence[int] = ()
    judged: int = 0
    tokens: Sequence[int] = ()
    dropped: int = 0
    ended: bool = False
    finite: bool = True

    @property
    def run_length(self) -> int:
        """Number of tokens committed and dropped."""
        return len(self.tokens) + self.dropped

    def accepted_of(self, tokens: int) -> int:
        """Count the accepted draft tokens among the first `tokens` of the run."""
        return min(len(self.path), tokens)

    def judged_of(self, tokens: int) -> int:
        """Count the draft tokens judged for the first `tokens` of the run: accepted ones, and a rejected one if any."""
        return min(self.judged, tokens)
