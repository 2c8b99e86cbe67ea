"""Drafts, the budgets that limit their size, and the verdicts of the target on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from selfspec.cache.tree import Tree
from selfspec.device import to_device
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import Sublayer
from selfspec.runtime.request import Behind

TokenPath = tuple[int, ...]
"""The tokens from the text's end on to a node of a tree."""

# The highest probability that a source may give a token.
_SUREST = 0.98


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
    def length(self) -> int:
        """Draft length: the most tokens that a row can accept, the depth of the tree."""
        return self.tree.depth


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
class Offer:
    """Holds the paths that one source proposes after the text of one row.

    Attributes:
        kind: groups offers of equal trust, such as the length of a match; a larger kind promises more.
        shares: for each path of tokens, the probability that the source gives the path's last token after the tokens
            before it. Prefixes of a path come first.
    """

    kind: int
    shares: dict[TokenPath, float]

    @classmethod
    def of_draft(cls, draft: Draft, tokens: Sequence[int], length: int) -> Offer:
        """Make an offer of one row's draft tokens, down to depth `length`, each with probability 1."""
        paths = (path for path in draft.tree.paths if len(path) <= length)
        return cls(draft.match_length, {tuple(tokens[node] for node in path): 1.0 for path in paths})

    def reach(self, trust: float) -> dict[TokenPath, float]:
        """Return the probability of each path, given the accepted tokens of such offers by the sum of their shares."""
        reach: dict[TokenPath, float] = {(): 1.0}
        for path, share in self.shares.items():
            reach[path] = reach[path[:-1]] * min(share * trust, _SUREST)
        del reach[()]
        return reach


@dataclass(frozen=True)
class Verdict:
    """Holds the verdict of one round.

    Attributes:
        running: numbers of the rows, in the order in which tensors hold them.
        rows: the verdict on each unfinished row, by its number.
        last_tokens: the last token of each running row after the round, `[rows, 1]`; arbitrary for finished rows.
    """

    running: Sequence[int]
    rows: Mapping[int, RowVerdict]
    last_tokens: Tensor

    def outcomes(self) -> list[RowOutcome | None]:
        """Return the outcome of each running row for the controller, in the order of tensors; None for finished rows.

        The controller also learns from tokens that lockstep dropped: only the other rows decide that they are dropped,
        and their places are drawn again, so their verdicts are valid evidence. Statistics leave them out.
        """
        return [self.rows[row].outcome() if row in self.rows else None for row in self.running]


@dataclass(frozen=True)
class RowVerdict:
    """Holds the verdict on one unfinished row.

    A run is the tokens that the rule lets the row commit: the accepted draft tokens and the target's token after them,
    up to the end of the row. Lockstep may drop the last tokens of a run.

    Attributes:
        drafted: its draft tokens, one for each node.
        path: the nodes that the rule accepted, in order.
        judged: number of places the rule judged: those of the accepted nodes, and one where it rejected all children.
        tokens: the part of its run that it commits.
        dropped: number of tokens of its run that lockstep dropped.
        ended: whether the row ends with `tokens`.
        finite: whether the target's logits after the accepted tokens were finite; if not, the run has no token there.
        overlap: for a coupled draft, the diagnostic of `selfspec.decode.judge` at each draft token; else empty.
    """

    drafted: Sequence[int]
    path: Sequence[int]
    judged: int
    tokens: Sequence[int]
    dropped: int
    ended: bool
    finite: bool
    overlap: Sequence[float]

    @property
    def run_length(self) -> int:
        """Tokens committed and dropped."""
        return len(self.tokens) + self.dropped

    def accepted_of(self, tokens: int) -> int:
        """Count the accepted draft tokens among the first `tokens` of the run."""
        return min(len(self.path), tokens)

    def judged_of(self, tokens: int) -> int:
        """Count the draft tokens judged for the first `tokens` of the run: accepted ones, and a rejected one if any."""
        return self.judged if tokens > len(self.path) else tokens

    def outcome(self) -> RowOutcome:
        """Return the counts that the controller learns from."""
        accepted, judged = self.accepted_of(self.run_length), self.judged_of(self.run_length)
        along = next((place for place, node in enumerate(self.path[:accepted]) if node != place), accepted)
        return RowOutcome(judged, accepted, len(self.tokens), self.dropped, accepted - along)

    def overlap_of(self, tokens: int) -> float:
        """Sum the overlap over the draft tokens judged for the first `tokens` of the run."""
        return sum(self.overlap[: self.judged_of(tokens)])


@dataclass(frozen=True)
class RowOutcome:
    """Counts the outcome of a round for one unfinished row, for the controller.

    Attributes:
        accepted: draft tokens accepted, committed or not.
        committed: tokens committed, the bonus or recovered token included.
        dropped: tokens accepted and then dropped to keep rows in lockstep.
        strayed: accepted tokens off the chain that the first nodes of the tree form.
    """

    judged: int
    accepted: int
    committed: int
    dropped: int = 0
    strayed: int = 0
