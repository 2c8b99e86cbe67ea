"""The view that a drafter has of a generation, and drafts whose rows are chains of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from selfspec.cache.tree import Tree
from selfspec.device import to_device
from selfspec.draft.draft import Budget, Draft
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.request import Draws
from selfspec.runtime.runner import ModelRunner


@dataclass(frozen=True)
class DrawnToken:
    """Holds a drawn child of each of some nodes, `[rows, nodes]`, and the q it was drawn from, `[rows, nodes, vocab]`.

    Under greedy decoding q is None: a token is accepted if it is the target's own choice.
    """

    token: Tensor
    q: Tensor | None


class DraftController(Protocol):
    """Answers a drafter's questions to the controller of a generation.

    Attributes:
        most: the largest budget of a round.
    """

    most: Budget

    def tries(self, match: int) -> bool:
        """Return whether a source may draft in this round: a look-up with a match of `match` tokens, or the model (0).

        Ask once for each source in a round.
        """

    def prefers(self, match: int, behind: Sequence[int]) -> bool:
        """Return whether a look-up with this match length promises more than the sources behind it, as in `tries`.

        The measure is the tokens that recent rounds with such drafts committed for their cost.
        """

    def round_cost(self, steps: int, nodes: int) -> float:
        """Return the cost in plain steps of a round with this many draft steps and draft tokens."""

    def price(self, steps: float, nodes: int) -> float:
        """Return the cost in plain steps of a round, for comparing drafts of different sources.

        Unlike `round_cost` it is an estimate that is the same for every batch size; no draft length depends on it.
        """

    def shape(self, chances: tuple[float, ...], budget: Budget) -> Tree:
        """Choose the shape of the model's draft where it may have branches.

        `chances` are the acceptance rates of siblings by rank where their place is reached, the likeliest first.
        """

    def look_up_length(self, share: float) -> int:
        """Return the most tokens worth looking up if this share of the pacing rows has a match; 0: none."""

    def goes_on(self, confidences: Callable[[], list[float]]) -> bool:
        """Return whether to draft another token after the last one, which is kept in any case.

        In a tree, the last one is the first token of its level. `confidences` returns, for each row, the largest
        probability where it was drawn, 0 without a distribution; it waits for the device, so it is called only if
        needed. Dropping a token because of its score would bias the output; ending the draft after it does not.
        """


class RowsView(Protocol):
    """Shows the rows of a generation before a round. A row keeps its number while it runs."""

    @property
    def size(self) -> int:
        """Number of rows, finished ones included."""

    @property
    def running(self) -> Sequence[int]:
        """Numbers of the rows that passes run, in the order in which tensors hold them."""

    @property
    def unfinished(self) -> AbstractSet[int]:
        """Numbers of the rows that have not ended; all of them run."""

    @property
    def pacing(self) -> AbstractSet[int]:
        """Numbers of the rows whose progress decides how fast the batch is."""

    @property
    def last_tokens(self) -> Tensor:
        """Last committed token of each running row, `[rows, 1]`."""

    @property
    def are_text(self) -> bool:
        """True if prompts are token ids alone, without embeddings and without a past of other tokens."""

    def text(self, row: int, start: int = 0) -> list[int]:
        """Return the prompt and the committed tokens of a row, without padding, from token `start` on."""

    def source(self, row: int) -> list[int]:
        """Return the tokens that an encoder has read for a row, if its vocabulary is the text's; else none."""

    def text_length(self, row: int) -> int:
        """Count the prompt and committed tokens of a row."""

    def remaining(self, row: int) -> int:
        """Return the most tokens that a row may still commit."""

    @property
    def longest(self) -> int:
        """Largest committed length of any row, prompt included."""

    @property
    def controller(self) -> DraftController:
        """The controller, which decides how long drafts are."""

    @property
    def greedy(self) -> bool:
        """True if all rows take the likeliest token."""

    @property
    def chains_only(self) -> bool:
        """True if logits processors with memory judge drafts place by place, which takes chains."""

    @property
    def reads_prefixes(self) -> bool:
        """True if logits processors depend on the tokens before a place."""

    @property
    def rows_apart(self) -> bool:
        """True if drafts of a row must be those that it would have alone; constant in a generation."""

    @property
    def in_lockstep(self) -> bool:
        """True if all rows commit only as many tokens of this round as the slowest row does.

        Then the tokens that one row accepts early in a draft must not depend on later tokens of another row. So the
        shape of a level may depend on the tokens down to it, and on no later ones.
        """

    def budget_of(self, row: int, budget: Budget) -> Budget:
        """Return the part of a round's budget that a row may use."""

    def row_lengths(self, draft: Draft) -> list[int]:
        """Return the depth up to which a draft is judged in each running row."""

    def no_draft(self) -> Draft:
        """Return a draft of no tokens."""

    def open_block(self, tree: Tree) -> None:
        """Make room in the shared cache for a draft of this shape, before its first pass."""

    def draft_scores(self, logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        """Return the scores to draw draft tokens by, `[rows, places, vocab]`: logits after processors and warpers.

        `drafted` are the draft tokens on the path to the last of these places, pieces of `[rows, tokens]`.
        """

    def draw_draft(self, scores: Tensor, node: int, place: int) -> DrawnToken:
        """Draw a child of each of some nodes at one depth from their scores, `[rows, nodes, vocab]`.

        `node` is the number of the first of these nodes, -1 for the last committed token; `place` is the number of
        tokens drawn for this draft before.
        """

    def draws(self, steps: int) -> Draws | None:
        """Return the draws of a chain if each takes the logits of its place alone, on a CPU; else None."""

    @property
    def runner(self) -> ModelRunner:
        """The runner of the model over the shared cache."""

    @property
    def programs(self) -> GraphCache | None:
        """The wrapper's recorded passes; None: the stock modules run every pass."""

    @property
    def memories(self) -> dict[Hashable, object]:
        """The memories that drafters keep as long as the wrapper lives, by drafter."""


def own_programs(rows: RowsView, owner: Hashable) -> GraphCache | None:
    """Return the programs of a model that `owner` drafts with, kept as long as the wrapper; None: it makes none."""
    if rows.programs is None:
        return None
    programs = rows.memories.setdefault(owner, rows.programs.for_another_model())
    assert isinstance(programs, GraphCache)
    return programs


def chains(rows: RowsView, tokens: Sequence[Sequence[int]], match_length: int) -> Draft:
    """Make a draft with a chain of these tokens for each running row; no draft if all chains are empty."""
    longest = max(map(len, tokens))
    if not longest:
        return rows.no_draft()
    filled = [[*row, *[last] * (longest - len(row))] for row, last in zip(tokens, last_known(rows), strict=True)]
    return Draft.chain(guesses(rows, filled), match_length=match_length, row_lengths=tuple(map(len, tokens)))


def guesses(rows: RowsView, tokens: Tensor | Sequence[Sequence[int]]) -> Tensor:
    """Bring draft tokens from a text, `[rows, nodes]`, to the device, with larger ids than the head has replaced."""
    return _writable(rows, to_device(tokens, rows.last_tokens.device))


def _writable(rows: RowsView, tokens: Tensor) -> Tensor:
    return tokens.clamp(max=rows.runner.vocabulary - 1)


def last_known(rows: RowsView) -> list[int]:
    """Return the last token of each running row's text, as filler for places that are not judged; 0 without a text."""
    return [next(iter(rows.text(row, rows.text_length(row) - 1)), 0) for row in rows.running]


def lengths_of(rows: RowsView, draft: Draft) -> tuple[int, ...]:
    """Return the number of draft tokens meant for each running row."""
    return draft.row_lengths or (draft.length,) * len(rows.running)


def filled_up(rows: RowsView, found: Draft, budget: Budget, propose: Callable[[Budget], Draft]) -> Draft:
    """Return a draft of `chains`, with chains of another source in the rows that have no tokens.

    The other source is asked only if an unfinished row needs it; it may draft for all rows.
    """
    taken = lengths_of(rows, found)
    wanting = rows.unfinished if budget.rows is None else rows.unfinished & budget.rows
    needing = frozenset(row for row, length in zip(rows.running, taken, strict=True) if row in wanting and not length)
    if not needing:
        return found
    other = propose(replace(budget, rows=needing))
    if not found.length or not other.length:
        return other if other.length else found
    own = to_device(taken, other.tokens.device)[:, None] > 0
    each = ((found, own), (other, ~own))
    tokens = _writable(rows, rows.last_tokens).repeat(1, max(found.length, other.length))
    for draft, its in each:
        tokens[:, : draft.length] = torch.where(its, draft.tokens, tokens[:, : draft.length])
    drawn = next((draft.probs for draft, _ in each if draft.probs is not None), None)
    probs = None
    if drawn is not None:
        # Tokens that were not drawn have a one-hot q.
        probs = drawn.new_zeros(*tokens.shape, drawn.shape[-1]).scatter_(-1, tokens[..., None], 1.0)
        for draft, its in each:
            if draft.probs is not None:
                part = probs[:, : draft.length]
                probs[:, : draft.length] = torch.where(its[..., None], draft.probs, part)
    theirs = lengths_of(rows, other)
    lengths = tuple(length or rest for length, rest in zip(taken, theirs, strict=True))
    return Draft.chain(tokens, probs, steps=other.steps, match_length=other.match_length, row_lengths=lengths)
