"""What a drafter sees of a generation: its rows, the controller, the model, and nothing else of the loop."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from selfspec.cache.tree import Tree
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.tree_shape import Shape
from selfspec.runtime.chain import Draws
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.runner import ModelRunner


@dataclass(frozen=True)
class DrawnToken:
    """A child of each of some nodes, `[rows, nodes]`, and the q that it is scored with, `[rows, nodes, vocab]`.

    Greedily there is none: it is scored by being the target's own choice.
    """

    token: Tensor
    q: Tensor | None


class DraftController(Protocol):
    """What a drafter may ask the controller of a generation.

    Attributes:
        most: the largest budget of a round.
    """

    most: Budget

    def tries(self, match: int) -> bool:
        """Whether a source may draft in this round: a look-up that matched so many tokens, or the model (0).

        Ask once a round for each.
        """

    def prefers(self, match: int, behind: Sequence[int]) -> bool:
        """Whether a look-up of so long a match promises more than the sources behind it, which are as in `tries`.

        By the tokens that rounds with such drafts have lately committed for what they cost.
        """

    def round_cost(self, steps: int, nodes: int) -> float:
        """Return the cost of a round of so many draft steps and draft tokens, in plain steps."""

    def price(self, steps: float, nodes: int) -> float:
        """Return what a round is held to cost where drafts of different sources are compared, in plain steps.

        Unlike `round_cost` it is an estimate that no length is chosen by, and the same in batches of any size.
        """

    def shape(self, chances: tuple[float, ...], budget: Budget) -> Shape:
        """Choose the shape of the model's draft where it may have branches.

        `chances` are that the sibling of each rank is accepted where its place is reached, the likeliest first.
        """

    def look_up_length(self, share: float) -> int:
        """Return the most tokens worth looking up where this share of the slowest rows has a match; 0: none."""

    def goes_on(self, confidences: Callable[[], list[float]]) -> bool:
        """Whether to draft another token after the last one, which is kept in any case.

        That one is the first of its level in a tree. `confidences` gives the largest probability of each row where it
        was drawn, 0 where there was no distribution; it waits for the device, so it is called only if that matters.
        Dropping a token because of its score would bias the output; ending the draft after it does not.
        """


class RowsView(Protocol):
    """The rows of a generation before a round. Rows have numbers, which stay theirs while they run."""

    @property
    def size(self) -> int:
        """Number of rows, finished ones included."""
        ...

    @property
    def running(self) -> Sequence[int]:
        """Numbers of the rows that passes run, in the order in which tensors hold them."""
        ...

    @property
    def unfinished(self) -> AbstractSet[int]:
        """Numbers of the rows that have not ended; all of them run."""
        ...

    @property
    def pacing(self) -> AbstractSet[int]:
        """Numbers of the rows whose progress decides how fast the batch is."""
        ...

    @property
    def last_tokens(self) -> Tensor:
        """The last committed token of each running row, `[rows, 1]`."""
        ...

    @property
    def are_text(self) -> bool:
        """Whether prompts are token ids alone: no embeddings, and no past of other tokens."""
        ...

    def text(self, row: int, start: int = 0) -> list[int]:
        """Return the prompt and the committed tokens of a row, without padding, from number `start` on."""
        ...

    def source(self, row: int) -> list[int]:
        """Return the tokens that an encoder has read for a row, if it has the text's own vocabulary; else none."""
        ...

    def text_length(self, row: int) -> int:
        """Count these tokens."""
        ...

    def remaining(self, row: int) -> int:
        """Return the most tokens that a row may still grow by."""
        ...

    @property
    def longest(self) -> int:
        """The largest committed length of any row, prompt included."""
        ...

    @property
    def controller(self) -> DraftController:
        """What decides how long drafts are."""
        ...

    @property
    def greedy(self) -> bool:
        """Whether all rows take the likeliest token."""
        ...

    @property
    def chains_only(self) -> bool:
        """Whether logits processors with memory judge drafts place by place, which takes chains."""
        ...

    @property
    def reads_prefixes(self) -> bool:
        """Whether logits processors depend on the tokens before a place."""
        ...

    @property
    def rows_apart(self) -> bool:
        """Whether drafts of a row must be those that it would have alone. The same all through a generation."""
        ...

    @property
    def in_lockstep(self) -> bool:
        """Whether rows are cut to what the slowest commits of this round.

        What one of them accepts of the first tokens of a draft must then say nothing of later tokens of another. So the
        shape of a level may depend on tokens down to it, and on no later ones.
        """
        ...

    def budget_of(self, row: int, budget: Budget) -> Budget:
        """Return the part of a round's budget that a row may use."""
        ...

    def row_lengths(self, draft: Draft) -> list[int]:
        """Return the depth up to which a draft is judged in each running row."""
        ...

    def no_draft(self) -> Draft:
        """Return a draft of no tokens."""
        ...

    def open_block(self, tree: Tree) -> None:
        """Make room in the shared cache for a draft of this shape, before its first pass."""
        ...

    def draft_scores(self, logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        """Return what draft tokens are drawn by, `[rows, places, vocab]`: logits as processors and warpers leave them.

        `drafted` are the draft tokens on the path to the last of these places, pieces of `[rows, tokens]`.
        """
        ...

    def draw_draft(self, scores: Tensor, node: int, place: int) -> DrawnToken:
        """Draw a child of each of some nodes at one depth from their scores, `[rows, nodes, vocab]`.

        `node` is the number of the first of these nodes, -1 for the last committed token; `place` of the first draw,
        the number of tokens that were drawn for this draft before.
        """
        ...

    def draws(self, steps: int) -> Draws | None:
        """Return the draws of a chain where each takes the logits of its place alone, on a CPU; else None."""
        ...

    @property
    def runner(self) -> ModelRunner:
        """Runs the model over the shared cache."""
        ...

    @property
    def programs(self) -> GraphCache | None:
        """The wrapper's recorded passes; None: the stock modules run all."""
        ...

    @property
    def memories(self) -> dict[Hashable, object]:
        """What drafters keep as long as the wrapper, by drafter."""
        ...


def own_programs(rows: RowsView, owner: Hashable) -> GraphCache | None:
    """Return the programs of a model that a drafter brings along, kept as long as the wrapper; None: it makes none.

    Args:
        rows: of the target.
        owner: the drafter, or that of its models whose they are.
    """
    if rows.programs is None:
        return None
    programs = rows.memories.setdefault(owner, rows.programs.for_another_model())
    assert isinstance(programs, GraphCache)
    return programs
